"""Tensor and pipeline ranks as Ray actors, on any nodes: one for each bundle of the replica's placement group.

    engine process (rank 0) -- socket -- replica -- Ray -- RankActor (ranks 1 and up) -- TCP -- engine process

A rank ends when rank 0 does, and the engine when a rank does: then the engine process starts anew, and its ranks too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quantkit.deploy.resources import Bundle
from quantkit.errors import QuantkitError
from quantkit.runtime.core import framing
from quantkit.runtime.parallel.launcher import Job
from quantkit.runtime.parallel.rank_process import run_worker
from quantkit.runtime.server.engine_process.client import EngineClient, start_module
from quantkit.runtime.server.logs import log_event


class RankActor:
    """One rank. Ray shows it the GPU of its bundle alone."""

    def run(self, job: str) -> None:
        """Until rank 0 says stop."""
        wanted = Job.from_json(job)
        run_worker(wanted.ranks, wanted.address, wanted.model, wanted.options)


class RankedClient(EngineClient):
    """An `EngineClient` whose engine process has other ranks beside it."""

    def __init__(self, model: str, options: dict[str, Any], bundles: list[Bundle]) -> None:
        super().__init__(model, options)
        self._bundles = bundles
        self._crew: asyncio.Task[None] | None = None

    async def close(self, drain_seconds: float = 0.0) -> None:
        await super().close(drain_seconds)
        await self._end_crew()

    async def _start_process(self, connection: socket.socket) -> asyncio.subprocess.Process:
        await self._end_crew()
        asked, asks = socket.socketpair()
        with asks:
            host = [ray.util.get_node_ip_address()]
            process = await start_module("quantkit.deploy.engine_process", connection, asks, more=host)
        self._crew = asyncio.create_task(_serve_ranks(asked, self._bundles))
        return process

    async def _end_crew(self) -> None:
        """However it ended, or must: the next engine gets a new one."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.cancel()
            await asyncio.wait([crew])
            if not crew.cancelled() and (error := crew.exception()) is not None:
                log_event("ranks failed", level=logging.ERROR, reason=f"{type(error).__name__}: {error}")


async def _serve_ranks(asked: socket.socket, bundles: list[Bundle]) -> None:
    """Starts and ends ranks as an engine process asks; when it is gone, so are they."""
    reader, writer = await asyncio.open_connection(sock=asked)
    actors: list[Any] = []
    watching: list[asyncio.Task[None]] = []
    try:
        while True:
            message = await framing.read_message_async(reader)
            if "start" in message:
                for job in message["start"]:
                    rank = json.loads(job)["ranks"]["rank"]
                    watching.append(asyncio.create_task(_run_rank(rank, job, bundles[rank], actors, writer)))
            else:
                _kill(actors)
                writer.write(framing.pack_message({"stopped": True}))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        for task in watching:
            task.cancel()
        _kill(actors)
        writer.close()


def _start(rank: int, bundle: Bundle) -> Any:
    group = ray.util.get_current_placement_group()
    if group is None:
        raise QuantkitError("a replica with several ranks needs its placement group")
    return (
        ray.remote(RankActor)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote()
    )


async def _run_rank(rank: int, job: str, bundle: Bundle, actors: list[Any], writer: asyncio.StreamWriter) -> None:
    """Until it ends; then the engine is told why."""
    try:
        actor = _start(rank, bundle)
        actors.append(actor)
        await actor.run.remote(job)
        why = "it ended"
    except ray.exceptions.RayTaskError as error:
        why = str(error).strip().splitlines()[-1]
    except ray.exceptions.RayError:
        why = "its Ray actor died"
    except Exception as error:  # whatever keeps it from starting: the engine must not wait for it
        why = f"it could not be started: {error}"
    writer.write(framing.pack_message({"ended": {"rank": rank, "why": why}}))


def _kill(actors: list[Any]) -> None:
    while actors:
        ray.kill(actors.pop())
