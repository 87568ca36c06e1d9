"""One replica of a model: the application of `quantkit serve` without a port, around an engine process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from quantkit.deploy.config import RANKS, ModelPlan
from quantkit.deploy.forwarding import Forwarded, Part, answer
from quantkit.deploy.resources import Bundle
from quantkit.errors import QuantkitError
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.app import create_app
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.logs import LOGGER, JsonFormatter
from quantkit.runtime.server.settings import ServerSettings
from quantkit.sources import model_folder


class Replica:
    """Ray Serve makes these, asks for their health and ends them."""

    async def __init__(self, settings: ServerSettings, model: ModelPlan, bundles: list[Bundle]) -> None:  # type: ignore[misc]
        """Serve awaits it."""
        log_to_stderr(settings.log_level)
        folder = await asyncio.to_thread(model_folder, settings.model)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._client = _client(settings, model, bundles)
        await self._client.start()
        self._app = create_app(settings, self._client, tokenizer)

    async def http(self, request: Forwarded) -> AsyncGenerator[Part, None]:
        """Answers one request: the replica's name at once, then what the application sends."""
        yield self._name
        async for messages in answer(self._app, request):
            yield messages

    async def check_health(self) -> None:
        """Called by Serve. A dead engine process is started again by its client; when that does not help for three
        checks, Serve replaces the replica."""
        if not self._client.ready:
            raise QuantkitError("the engine process is not ready")

    async def describe(self) -> dict[str, Any]:
        """For `--status`."""
        stats = self._client.stats
        return {
            "replica": self._name,
            "pid": os.getpid(),
            "engine_pid": self._client.pid,
            "ready": self._client.ready,
            "engine_restarts": self._client.restarts,
            "running": stats.running,
            "waiting": stats.waiting,
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "kv_pages_used": stats.kv_pages_used,
        }

    async def metrics(self) -> tuple[str, str]:
        """The replica's name and its numbers in Prometheus' text format."""
        request = Forwarded("GET", "/metrics", b"", (), None, b"")
        sent = [message async for messages in answer(self._app, request) for message in messages]
        return self._name, b"".join(message.get("body", b"") for message in sent).decode()

    async def __del__(self) -> None:
        """Serve awaits it after the last request of the replica."""
        client = getattr(self, "_client", None)
        if client is not None:
            await client.close()


def _client(settings: ServerSettings, model: ModelPlan, bundles: list[Bundle]) -> EngineClient:
    if model.ranks == 1:
        return EngineClient(settings.model, settings.engine_options)
    from quantkit.deploy.ranks import RankedClient

    parallel = {name: getattr(model, name) for name in RANKS}
    return RankedClient(settings.model, settings.engine_options | parallel, bundles)


def log_to_stderr(level: str) -> None:
    """Our lines as JSON into the log of this Ray worker; what Ray logs stays as it is."""
    logger = logging.getLogger(LOGGER)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())
