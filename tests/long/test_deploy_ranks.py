"""A replica whose model is divided among ranks: Ray actors in its placement group, on a real cluster."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray.serve", reason="needs the extra `ray`: pip install 'quantkit[ray]'")
pytestmark = [pytest.mark.long, pytest.mark.ray]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # or Ray would make one for the user
ENVIRONMENT = os.environ | TOKEN | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
ENGINE = {"device": "cpu", "max_context": 128, "kv_tokens": 1024}
WAIT_SECONDS = 240.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def text_of(port: int, model: str) -> str:
    body = json.dumps({"model": model, "prompt": "The function returns", "max_tokens": 24, "temperature": 0})
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        return str(json.loads(response.read())["choices"][0]["text"])


def engine(address: str, model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "quantkit", "deploy", "--status", "--json", "--address", address]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=WAIT_SECONDS)
    assert run.returncode == 0, run.stderr
    (found,) = json.loads(run.stdout)["deployments"][model]["engines"]
    return dict(found)


def rank_processes() -> list[int]:
    """Of this test alone: they carry its token in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = TOKEN["RAY_AUTH_TOKEN"].encode() in (folder / "environ").read_bytes()
            if ours and b"RankActor" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_two_ranks_answer_as_one_and_come_back_when_one_dies(tmp_path: Path) -> None:
    port = free_port()
    whole = {"name": "whole", "path": "demo", "cpus": 0.2, "options": ENGINE}
    divided = whole | {"name": "divided", "tensor_parallel": 2}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"http": {"port": port}, "models": [whole, divided]}))
    command = [sys.executable, "-m", "quantkit", "deploy", str(tmp_path / "models.yaml")]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        assert "quantkit serves whole, divided" in process.stdout.readline(), (tmp_path / "stderr").read_text()
        address = re.search(r"Ray cluster at (\S+)", (tmp_path / "stderr").read_text())
        assert address
        expected = text_of(port, "whole")
        assert text_of(port, "divided") == expected
        (rank,) = rank_processes()
        before = engine(address[1], "model-divided")
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + WAIT_SECONDS
        while (found := engine(address[1], "model-divided"))["engine_pid"] == before["engine_pid"] or not found[
            "ready"
        ]:
            assert time.monotonic() < end, found
        assert text_of(port, "divided") == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, (tmp_path / "stderr").read_text()
        assert rank_processes() == []
    finally:
        process.kill()
        process.communicate()
