"""Threads of processes that compute wait for each other asleep, unless somebody has said how they wait."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.runtime.server.engine_process.client import start_module
from quantkit.threads import PATIENCE, wait_asleep


def test_what_somebody_said_stays() -> None:
    environment = {"HOME": "/"}
    wait_asleep(environment)
    assert environment == {"HOME": "/", **PATIENCE}
    for said in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        environment = {said: "3"}
        wait_asleep(environment)
        assert environment == {said: "3"}


def test_it_is_said_before_torch_is_loaded() -> None:
    shows = "import quantkit, os, sys; print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])"
    unsaid = {name: value for name, value in os.environ.items() if name not in (*PATIENCE, "OMP_WAIT_POLICY")}
    shown = subprocess.run([sys.executable, "-c", shows], env=unsaid, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", PATIENCE["GOMP_SPINCOUNT"]]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="other systems do not show it")
def test_an_engine_process_waits_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PATIENCE, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    wait_asleep(os.environ)

    async def environment_of_a_process() -> bytes:
        own, other = socket.socketpair()
        with own, other:
            process = await start_module("http.server", other)  # whose first argument is a port
            found = b""
            while not found:  # until Python has begun
                await asyncio.sleep(0.01)
                found = Path(f"/proc/{process.pid}/environ").read_bytes()
            process.kill()
            await process.wait()
            return found

    for name, value in PATIENCE.items():
        assert f"{name}={value}".encode() in asyncio.run(environment_of_a_process()).split(b"\0")
