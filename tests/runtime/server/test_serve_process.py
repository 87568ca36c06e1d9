"""`quantkit serve` as a process: it becomes ready, answers, and ends the way an operator expects."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("engine-process")
CHAT = {"model": "small", "messages": [{"role": "user", "content": "What is a list?"}], "temperature": 0}
LONG = CHAT | {"stream": True, "max_tokens": 250, "ignore_eos": True}
Serving = Callable[..., AbstractContextManager[Any]]


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "server.yaml"
    file.write_text("model: demo-draft\nserved_model_name: [small]\ndevice: cpu\nport: 0\nvllm_metric_names: true\n")
    return file


@pytest.mark.long  # in every run, the server of `test_several_models.py` comes to its graceful end
def test_a_server_from_its_file_to_its_graceful_end(serving: Serving, config: Path) -> None:
    with serving("--config", str(config)) as served:
        request_id = _answers_and_counts(served)
        (engine,) = served.children

        with served.connection() as connection:
            response = served.send(connection, "POST", "/v1/chat/completions", LONG)
            assert response.readline().startswith(b"data: ")
            served.process.send_signal(signal.SIGTERM)
            served.wait_for('"draining"', served.err)
            _refuses_new_requests(served)
            answer = response.read().decode()
        assert '"finish_reason":"length"' in answer
        assert answer.rstrip().endswith("data: [DONE]")
        assert served.end() == 0
        assert gone(engine)
        _check_log(served, request_id)
        assert served.events()[-1]["message"] == "stopped"


def _answers_and_counts(served: Any) -> str:
    """Returns the id of the request that was answered."""
    assert served.ask("GET", "/ready")[0] == 200
    status, headers, text = served.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": 4})
    assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 4)
    assert served.ask("POST", "/v1/chat/completions", CHAT, key="not-a-known-key-at-all")[0] == 401
    metrics = served.ask("GET", "/metrics")[2]
    assert 'quantkit:request_success_total{finished_reason="length",model_name="small"} 1.0' in metrics
    assert 'vllm:generation_tokens_total{model_name="small"} 4.0' in metrics
    assert 'quantkit:request_refused_total{model_name="small",status="401"} 1.0' in metrics
    return str(headers["x-request-id"])


def _refuses_new_requests(served: Any) -> None:
    status, headers, text = served.ask("POST", "/v1/chat/completions", CHAT)
    assert (status, headers["Retry-After"]) == (503, "5")
    assert json.loads(text)["error"]["code"] == "draining"
    assert served.ask("GET", "/ready")[0] == 503
    assert served.ask("GET", "/health")[0] == 200


def _check_log(served: Any, request_id: str) -> None:
    assert len(served.out) == 1, "one line on stdout: where it serves"
    events = served.events()
    requests = [event for event in events if event["message"] == "request"]
    (first,) = [event for event in requests if event["request_id"] == request_id]
    assert (first["status"], first["generated_tokens"], first["key_name"]) == (200, 4, "tester")
    assert [event["open_requests"] for event in events if event["message"] == "draining"] == [1]
    printed = "".join(served.err)
    assert served.key not in printed
    assert "What is a list" not in printed


def test_a_server_from_its_file_to_a_second_signal_that_ends_it_at_once(serving: Serving, config: Path) -> None:
    """As Ctrl-C does it: the signal goes to all processes of the terminal. With a shadow there are three."""
    with serving("--config", str(config), "--shadow", "demo-draft") as served:
        assert 'quantkit:shadow{model_name="small",number="compared"} 0.0' in served.ask("GET", "/metrics")[2]
        request_id = _answers_and_counts(served)
        with served.connection() as connection:
            response = served.send(connection, "POST", "/v1/chat/completions", LONG | {"max_tokens": 1500})
            assert response.readline().startswith(b"data: ")
            engines = served.children
            assert len(engines) == 2
            os.killpg(served.process.pid, signal.SIGINT)
            served.wait_for('"draining"', served.err)
            assert response.readline() == b"\n"
            assert response.readline().startswith(b"data: "), "the engine works on"
            _refuses_new_requests(served)
            os.killpg(served.process.pid, signal.SIGINT)
            begin = time.monotonic()
            assert served.end() == 1
            assert time.monotonic() - begin < 3
        assert all(gone(engine) for engine in engines)
        _check_log(served, request_id)


def test_a_signal_while_loading_ends_the_server(serving: Serving) -> None:
    with serving("demo-draft", "--device", "cpu", "--port", "0") as served:
        served.wait_for("loading demo-draft", served.err)
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        assert served.out == []
        assert all("Traceback" not in line for line in served.err), "".join(served.err)


def test_a_port_in_use_is_found_before_the_model_is_loaded(serving: Serving) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serving("demo-draft", "--device", "cpu", "--port", port) as served:
            assert served.end() == 2
            assert served.err == [
                f"quantkit: cannot listen on 127.0.0.1 port {port}: another process uses it; choose another --port\n"
            ]


IMPOSSIBLE = ("demo-draft", "--device", "cpu", "--port", "0", "--max-context", "1000000")


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(
    run_cli: Callable[..., tuple[int, str, str]],
) -> None:
    """The engine is a process here, the server is not."""
    code, out, err = run_cli("serve", *IMPOSSIBLE)
    _check_reason(code, out, err.splitlines())


@pytest.mark.long
def test_a_server_process_ends_with_the_reason_of_its_engine(serving: Serving) -> None:
    with serving(*IMPOSSIBLE) as served:
        _check_reason(served.end(), "".join(served.out), served.err)


def _check_reason(code: int, out: str, err: list[str]) -> None:
    assert code in (1, 2)
    assert err[-1].startswith("quantkit: ")
    assert all("Traceback" not in line for line in err)
    assert out == ""
