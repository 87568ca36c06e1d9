"""`quantkit bench serve` from end to end, against scripted answers and against our own server."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., tuple[int, str, str]]
ScriptedServer = Any  # conftest.py has it


def test_json_of_the_command(run_cli: Cli, server: ScriptedServer) -> None:
    args = ("--concurrency", "1,3", "--requests", 6, "--new-tokens", 20, "--goodput", "ttft=60000", "--no-save")
    code, out, err = run_cli("bench", "serve", "--url", server.url + "/v1", *args, "--json", "--api-key", "sk-test")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [row["concurrency"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert (row["model"], row["endpoint"], row["requests"], row["whole"]) == ("scripted", "chat", 6, 6)
        assert (row["output_tokens"], row["token_events"], row["prompt_tokens"]) == (120, 120, 30)
        assert (row["answers_with_usage"], row["errors"]) == (6, {})
        assert [note for note in row["notes"] if "busy" not in note] == []
        assert row["seconds"] == pytest.approx(120 / row["output_tokens_per_second"], abs=6e-4)  # it is rounded
        assert row["goodput"]["percent"] == 100.0
        for time_name in ("ttft", "tpot", "itl", "e2e"):
            marks = row[f"{time_name}_ms"]
            assert 0 <= marks["p50"] <= marks["p95"] <= marks["p99"]
    assert any("/tokenize" in note for note in report["notes"])
    warm_ups = [request for request in server.requests if request["max_tokens"] == 16]
    assert len(warm_ups) == 1 + 3
    assert len(server.requests) == len(warm_ups) + 12
    assert len({json.dumps(request["messages"]) for request in server.requests}) == len(server.requests)
    assert all("Authorization: Bearer sk-test\r\n" in head for head in server.heads)


def test_token_ids_and_sized_words(run_cli: Cli, server: ScriptedServer) -> None:
    args = ("--url", server.url, "--concurrency", 1, "--requests", 1, "--warm-up", 0, "--no-save", "--prompt-len", 30)
    server.other["/tokenize"] = json.dumps({"tokens": [7, 8, 9] * 200, "count": 600}).encode()  # three for each word
    assert run_cli("bench", "serve", *args)[0] == 0
    assert len(server.requests[-1]["messages"][0]["content"].split()) == 10
    server.script = lambda request: [server.refusal(418, "later")]
    assert run_cli("bench", "serve", *args, "--endpoint", "completions")[0] == 1
    assert set(server.requests[-1]["prompt"]) == {7, 8, 9}
    server.other["/version"] = json.dumps({"version": "1", "vocab": 3}).encode()
    run_cli("bench", "serve", *args, "--endpoint", "completions")
    assert set(server.requests[-1]["prompt"]) == {0, 1, 2}
    assert len(server.requests[-1]["prompt"]) == 30


def test_prompts_of_a_file(run_cli: Cli, server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    args = ("--url", server.url, "--concurrency", 1, "--requests", 3, "--warm-up", 0, "--no-save")
    code, out, _ = run_cli("bench", "serve", *args, "--prompts", file)
    assert code == 0
    assert [request["messages"][0]["content"] for request in server.requests] == ["one", "two", "one"]
    assert "2 prompts were sent 3 times" in out


def test_table_file_and_plot(run_cli: Cli, server: ScriptedServer, tmp_path: Path) -> None:
    file, svg, html = tmp_path / "serve.csv", tmp_path / "plot.svg", tmp_path / "plot.html"
    args = ("--url", server.url, "--concurrency", "1,2", "--requests", 4, "--new-tokens", 8, "--output", file)
    for plot, rows in ((svg, 2), (html, 4)):
        code, out, err = run_cli("bench", "serve", *args, "--plot", plot, "--goodput", "ttft=60000,e2e=60000")
        assert (code, err) == (0, "")
        assert "2 at once" in out
        assert "TTFT" in out
        with file.open() as opened:
            assert len(list(csv.DictReader(opened))) == rows
    drawing = ET.parse(svg).getroot()
    assert len(drawing.findall(".//{*}polyline")) == 4
    texts = [text.text or "" for text in drawing.findall(".//{*}text")]
    assert any("ms from request to first token" in text for text in texts)
    assert any("% of gaps" in text for text in texts)
    assert "<table>" in html.read_text()
    for plot in (svg, html):
        assert re.findall(r"https?://[^\s\"]+", plot.read_text()) == ["http://www.w3.org/2000/svg"]
    file.write_text("other,columns\n")
    code, _, err = run_cli("bench", "serve", *args)
    assert code == 2
    assert "other columns" in err


def test_partial_and_total_failure(run_cli: Cli, server: ScriptedServer) -> None:
    turn = iter(range(100))
    server.script = lambda request: [server.refusal(503, "busy")] if next(turn) % 2 else server.full_answer(request)
    args = ("--url", server.url, "--concurrency", 1, "--requests", 4, "--new-tokens", 3, "--no-save")
    code, out, err = run_cli("bench", "serve", *args, "--warm-up", 0)
    assert (code, err) == (0, "")
    assert "2 status 503" in out
    assert "status 503: busy" in out
    server.script = lambda request: [server.refusal(400, "no ignore_eos here")]
    for more in (("--warm-up", 0), ()):
        code, _, err = run_cli("bench", "serve", *args, *more)
        assert code == 1
        assert err.count("\n") == 1
        assert "no ignore_eos here" in err


def test_a_server_that_is_not_there(run_cli: Cli) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, out, err = run_cli("bench", "serve", "--url", url)
    assert (code, out) == (1, "")
    assert err == f"quantkit: no server answers at {url}: Connection refused; " + (
        "start one with 'quantkit serve MODEL', or give its --url\n"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--concurrency", "1", "--rate", "2"), "not both"),
        (("--requests", "1", "--seconds", "2"), "not both"),
        (("--concurrency", "two"), "whole numbers"),
        (("--concurrency", "0"), "above 0"),
        (("--concurrency", ","), "empty"),
        (("--rate", "fast"), "numbers"),
        (("--rate", "-1"), "above 0"),
        (("--seconds", "0"), "above 0"),
        (("--ramp-up", "-1"), "0 or more"),
        (("--vary", "1"), "below 1"),
        (("--ramp-up", "1", "--rate", "2"), "--concurrency"),
        (("--timeout", "nan"), "above 0"),
        (("--goodput", "tftt=3"), "did you mean 'ttft'"),
        (("--url", "127.0.0.1:8000"), "--url"),
        (("--endpoint", "embeddings"), "embeddings"),
        (("--new-tokens", "0"), "new-tokens"),
        (("--plot", "plot.png"), ".svg"),
        (("--no-save", "--output", "x.csv"), "--no-save"),
    ],
)
def test_wrong_flags(run_cli: Cli, args: tuple[str, ...], words: str) -> None:
    code, out, err = run_cli("bench", "serve", *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_too_long_for_the_model(run_cli: Cli, server: ScriptedServer) -> None:
    server.other["/v1/models"] = json.dumps({"data": [{"id": "scripted", "max_model_len": 300}]}).encode()
    code, _, err = run_cli("bench", "serve", "--url", server.url)
    assert code == 2
    assert "300 tokens" in err
    assert run_cli("bench", "serve", "--url", server.url, "--new-tokens", 2, "--requests", 1, "--no-save")[0] == 0


@pytest.fixture
def live_url(tmp_path: Path) -> Iterator[str]:
    """`quantkit serve demo-draft` on a CPU, as a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quantkit", "serve", "demo-draft", "--device", "cpu", "--port", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", tmp_path / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"not ready: {log.read_text()}")


@pytest.mark.long
def test_against_the_real_server(run_cli: Cli, live_url: str) -> None:
    args = ("--url", live_url, "--concurrency", "1,4", "--requests", 4, "--prompt-len", 16, "--new-tokens", 6)
    for endpoint in ("chat", "completions"):
        code, out, err = run_cli("bench", "serve", *args, "--endpoint", endpoint, "--json", "--no-save")
        assert (code, err) == (0, "")
        for row in json.loads(out)["rows"]:
            assert (row["whole"], row["errors"], row["answers_with_usage"]) == (4, {}, 4)
            assert row["output_tokens"] == 4 * 6
            assert 0 < row["token_events"] <= row["output_tokens"]
            assert endpoint == "chat" or row["prompt_tokens"] == 4 * 16
