"""One model of a running server: its engine process, and the reference's where answers are compared."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.logs import log_event
from quantkit.runtime.server.models.memory_split import MemoryShare
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.server.shadow import ShadowWatch

WATCH_SECONDS = 0.25  # between looks at the engine, for the log
_MOST_MEMORY = 0.98  # of a device: the plan has divided it, an engine's own look only guards against surprises


class ModelEngines:
    """`share` and `shadow_share` are what a plan for several models gave its engines; alone, they look for themselves.

    A number of tokens then stands for a share: an engine takes it whatever the others hold when it starts.
    """

    def __init__(
        self,
        settings: ServerSettings,
        share: MemoryShare | None = None,
        shadow_share: MemoryShare | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.names[0]
        self.device = None if share is None else share.device
        self.client = EngineClient(settings.model, _sized(settings.engine_options, share))
        self.shadow: ShadowWatch | None = None
        self._clients = [self.client]
        if settings.shadow is not None:
            options = _sized(settings.shadow_engine_options, shadow_share)
            reference = EngineClient(settings.shadow, options, guides=False)
            self.shadow = ShadowWatch(self.client, reference, settings.shadow_rate)
            self._clients.append(reference)

    @property
    def pids(self) -> list[int]:
        return [client.pid for client in self._clients if client.pid is not None]

    async def start(self) -> None:
        """The reference goes first: its size is known, and the cache of a model that is alone takes what is left."""
        try:
            if self.shadow is not None:
                await self.shadow.start()
            await self.client.start()
        except QuantkitError as error:
            if self.device is None:  # there is no other model that it could be about
                raise
            kind = InputError if error.exit_code == InputError.exit_code else QuantkitError
            raise kind(f"model '{self.name}': {error}") from error

    async def close(self) -> None:
        if self.shadow is not None:
            await self.shadow.close()
        await self.client.close()

    async def watch(self) -> None:
        """Tells the log when a step failed, when the engine process died, and when another one answers."""
        known, gone = 0, False
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            while self.client.troubles:
                told: dict[str, Any] = self.client.troubles.pop(0)
                log_event(told.pop("event"), level=logging.ERROR, model=self.name, **told)
            if self.client.restarts > known:
                known, gone = self.client.restarts, True
                told = {"model": self.name, "restarts": known}
                log_event("the engine process died; starting another one", level=logging.ERROR, **told)
            if gone and self.client.ready:
                gone = False
                log_event("the engine is ready again", model=self.name, pid=self.client.pid)


def _sized(options: dict[str, Any], share: MemoryShare | None) -> dict[str, Any]:
    if share is None:
        return options
    return options | {"kv_tokens": share.kv_tokens, "memory_share": _MOST_MEMORY}


async def start_models(models: list[ModelEngines]) -> None:
    """Those of one device one after the other: what an engine measures while it warms up should be about itself."""
    devices = dict.fromkeys(model.device for model in models)
    rows = [[model for model in models if model.device == device] for device in devices]
    tasks = [asyncio.ensure_future(_start_row(row)) for row in rows]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # one that failed ends the others
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start_row(models: list[ModelEngines]) -> None:
    for model in models:
        await model.start()
