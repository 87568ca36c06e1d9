"""Processes that compute wait asleep for each other's threads, unless somebody has said how they wait."""

import asyncio
import socket
from pathlib import Path

import pytest

from quantkit.runtime.server.engine_process.client import start_module
from quantkit.threads import PATIENCE, patient


def test_what_somebody_said_stays() -> None:
    assert patient({"HOME": "/"}) == {"HOME": "/", **PATIENCE}
    for said in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert patient({said: "3"}) == {said: "3"}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="other systems do not show it")
def test_an_engine_process_waits_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PATIENCE, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

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
