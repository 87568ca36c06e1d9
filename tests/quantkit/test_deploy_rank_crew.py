"""Ranks that cannot be started: the engine hears why at once, and the next one gets a new crew.

Ray itself is not asked for anything here: tests/long/test_deploy_ranks.py does that.
"""

import asyncio
import importlib
import logging
import socket
import time
import warnings
from types import ModuleType
from typing import Any

import pytest

from quantkit.deploy.engine_process import ReplicaLauncher
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.parallel.launcher import Address, Job

JOB = Job(Ranks(2, 1, 1), Address("127.0.0.1", 1, "00"), "demo", EngineOptions(device="cpu", tensor_parallel=2))
BUNDLES = [{"CPU": 1.0}, {"CPU": 1.0}]


@pytest.fixture(scope="module")
def ranks() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("quantkit.deploy.ranks")


def reason_of(launcher: ReplicaLauncher) -> str:
    end = time.monotonic() + 10
    while not launcher.check() and time.monotonic() < end:
        time.sleep(0.01)
    return launcher.check().get(1, "nobody said anything")


def test_a_rank_that_cannot_be_started_has_ended(ranks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: int, bundle: Any) -> Any:
        raise RuntimeError(f"no node has room for rank {rank}")

    async def run() -> str:
        asked, asks = pair
        crew = asyncio.create_task(ranks._serve_ranks(asked, BUNDLES))
        launcher = ReplicaLauncher(asks, "127.0.0.1")
        launcher.start([JOB])
        reason = await asyncio.to_thread(reason_of, launcher)
        await asyncio.to_thread(launcher.stop)
        crew.cancel()
        await asyncio.wait([crew])
        return reason

    monkeypatch.setattr(ranks, "_start", fail)
    pair = socket.socketpair()
    with pair[0], pair[1]:
        found = asyncio.run(run())
    assert found == "it could not be started: no node has room for rank 1"


def test_ranks_end_with_the_replica_that_started_them() -> None:
    asked, asks = socket.socketpair()
    with asks:
        launcher = ReplicaLauncher(asks, "127.0.0.1")
        launcher.start([JOB])
        assert launcher.check() == {}
        asked.close()
        assert reason_of(launcher) == "the replica that started it is gone"


def test_a_crew_that_failed_is_cleared_for_the_next_engine(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every later start would raise the first crew's error."""
    crews: list[str] = []

    async def serve(asked: socket.socket, bundles: Any) -> None:
        asked.close()
        crews.append("new")
        if len(crews) == 1:
            raise OSError("the first crew fails")
        await asyncio.sleep(60)

    async def started(*args: Any, **more: Any) -> str:
        return "process"

    async def run() -> None:
        client = ranks.RankedClient("demo", {}, BUNDLES)
        for _ in range(3):
            connection, other = socket.socketpair()
            with connection, other:
                assert await client._start_process(connection) == "process"
            await asyncio.sleep(0)
        assert crews == ["new"] * 3
        await client._end_crew()
        assert client._crew is None

    monkeypatch.setattr(ranks, "_serve_ranks", serve)
    monkeypatch.setattr(ranks, "start_module", started)
    monkeypatch.setattr(ranks.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with caplog.at_level(logging.ERROR, "quantkit.server"):
        asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage() == "ranks failed"
    assert record.fields["reason"] == "OSError: the first crew fails"  # type: ignore[attr-defined]
