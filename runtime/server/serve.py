"""From settings to a server that answers, and to its end.

    bind the port -> plan the memory of several models -> start engines -> listen -> (signal) -> drain -> exit

The port is bound before the model is loaded, so that a port in use is found at once, but nobody can connect before the
engine is ready. While draining, the server still listens: new requests get 503 with Retry-After, accepted ones finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from quantkit.errors import InputError
from quantkit.runtime.server.connections import ImpatientProtocol, cut_unread_connections
from quantkit.runtime.server.logs import log_event, setup_logging
from quantkit.runtime.server.settings import ServerSettings
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from transformers import PreTrainedTokenizerBase

    from quantkit.runtime.server.middleware.drain import DrainGate
    from quantkit.runtime.server.models.engines import ModelEngines
    from quantkit.runtime.server.models.memory_split import MemoryShare

STILL_LOADING_SECONDS = 10.0  # between two lines that say so
KEEP_ALIVE_SECONDS = 75  # longer than the 60 of nginx: the side that opens connections should close them
_LAST_WORDS_SECONDS = 1  # for connections that are still open when the time to drain is over


def run(served: Sequence[ServerSettings]) -> int:
    """Serves one model or several until a signal comes; the exit code of the process."""
    settings = served[0]  # what is not about models is the same in all
    setup_logging(settings.log_level)
    _check_tls(settings)
    with _bind(settings.host, settings.port) as listener:
        if settings.warning is not None:
            _say(settings.warning, warn=True)
        factory = uvicorn.Config(_nothing, log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_Serving(served, listener).run())


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would refuse connections at the first one."""
        yield


class _Serving:
    """One run of the server."""

    def __init__(self, served: Sequence[ServerSettings], listener: socket.socket) -> None:
        self._served = list(served)
        self._settings = served[0]
        self._listener = listener
        self._stopping = asyncio.Event()
        self._models: list[ModelEngines] = []

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            app = await self._until_stopped(self._load())
            if app is not None:
                await self._listen(app)
        finally:
            await self._close_models()
        log_event("stopped")
        return 0

    def _on_signal(self) -> None:
        """The first asks for a graceful end, the second does not wait for one."""
        if not self._stopping.is_set():
            self._stopping.set()
            return
        for model in self._models:
            for pid in model.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)

    async def _until_stopped(self, work: Any) -> Any:
        """What the work gives; None where a signal came first, and the work was cancelled."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        return None

    async def _load(self) -> ASGIApp:
        """The application around engines that are ready."""
        began = time.monotonic()
        folders = []
        for settings in self._served:  # wrong names are found before long imports
            folders.append(await asyncio.to_thread(model_folder, settings.model))
            if settings.shadow is not None:
                await asyncio.to_thread(model_folder, settings.shadow)
        shares = await self._plan() if len(self._served) > 1 else {}
        named = ", ".join(settings.model for settings in self._served)
        _say(f"loading {named}")
        telling = asyncio.ensure_future(_tell_that_it_loads(named, began))
        try:
            await asyncio.to_thread(_import_engine_client)
            _, tokenizers = await asyncio.gather(
                self._start_models(shares), asyncio.to_thread(_application_parts, folders)
            )
        finally:
            telling.cancel()
        from quantkit.runtime.server.app import create_app_of
        from quantkit.runtime.server.models.served_model import make_served_model

        served = [
            make_served_model(model.settings, model.client, tokenizer, model.shadow)
            for model, tokenizer in zip(self._models, tokenizers, strict=True)
        ]
        for model in self._models:
            self._say_ready(model, time.monotonic() - began)
        app = create_app_of(served)
        for virtual in app.state.models.virtual.values():
            members = ", ".join(model.names[0] for model in app.state.models.members_of(virtual))
            _say(f"{virtual.name} is virtual: {virtual.policy} of {members}, asked in this order")
        return app

    async def _plan(self) -> dict[str, MemoryShare]:
        """Several models divide the memory before the first of them is loaded; one takes what it finds."""
        from quantkit.runtime.server.models.memory_planning import engine_specs, plan_engines
        from quantkit.runtime.server.models.memory_split import as_table

        shares = await plan_engines(engine_specs(self._served))
        print(as_table(shares), flush=True)
        return {share.name: share for share in shares}

    async def _start_models(self, shares: dict[str, MemoryShare]) -> None:
        from quantkit.runtime.server.models.engines import ModelEngines, start_models
        from quantkit.runtime.server.models.memory_planning import shadow_name

        for settings in self._served:
            name = settings.names[0]
            self._models.append(ModelEngines(settings, shares.get(name), shares.get(shadow_name(name))))
        await start_models(self._models)

    def _say_ready(self, model: ModelEngines, seconds: float) -> None:
        info = model.client.info
        assert info is not None
        named = "" if len(self._models) == 1 else f"{model.name} is "
        _say(
            f"{named}ready after {seconds:.1f} s: {info.format} on {info.device}, "
            f"contexts of {info.max_context} tokens, {info.kv_tokens} tokens in the cache"
        )
        if info.kv_reason:
            _say(f"{named and model.name + ': '}KV cache in {info.kv_dtype}: {info.kv_reason}")
        if info.kernels is not None:
            _say(f"{model.name}: {info.kernels}" if named else info.kernels)

    async def _close_models(self) -> None:
        await asyncio.gather(*(model.close() for model in self._models))

    async def _listen(self, app: ASGIApp) -> None:
        from quantkit.runtime.server.middleware.drain import DrainGate

        settings, gate = self._settings, DrainGate(app)
        config = uvicorn.Config(
            gate,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            http=ImpatientProtocol,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            limit_concurrency=settings.max_connections,
            timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
            ssl_certfile=settings.tls_certfile,
            ssl_keyfile=settings.tls_keyfile,
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            print(f"quantkit serves {', '.join(model.name for model in self._models)} at {self._url()}", flush=True)
            watching = [asyncio.ensure_future(model.watch()) for model in self._models]
            await self._until_stopped(asyncio.shield(serving))
            await self._drain(gate)
            for task in watching:
                task.cancel()
        server.should_exit = True
        try:
            await serving
        except OSError as error:  # two servers that loaded at the same time; the port was free when this one began
            raise InputError(f"cannot listen on {self._url()}: {error.strerror or error}") from error

    async def _drain(self, gate: DrainGate) -> None:
        gate.draining = True
        log_event("draining", open_requests=gate.inside, drain_seconds=self._settings.drain_seconds)
        await _until_empty(gate, self._settings.drain_seconds)
        if gate.inside:
            log_event("the time to drain is over", level=logging.WARNING, cut_requests=gate.inside)
            await self._close_models()  # tells everybody who still waits
            await _until_empty(gate, _LAST_WORDS_SECONDS)

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._settings.tls_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _until_empty(gate: DrainGate, seconds: float) -> None:
    end = time.monotonic() + seconds
    while gate.inside and time.monotonic() < end:
        await asyncio.sleep(0.02)


def _import_engine_client() -> None:
    """Takes seconds (torch), so a thread does it: signals and lines about the loading go on meanwhile."""
    import quantkit.runtime.server.models.engines  # noqa: F401


def _application_parts(folders: Sequence[Path]) -> list[PreTrainedTokenizerBase | None]:
    """What the application needs besides engines, loaded while the engine processes start."""
    import quantkit.runtime.server.app  # noqa: F401
    from quantkit.runtime.output.tokenizer import load_tokenizer

    return [load_tokenizer(folder) for folder in folders]


async def _tell_that_it_loads(model: str, began: float) -> None:
    while True:
        await asyncio.sleep(STILL_LOADING_SECONDS)
        _say(f"still loading {model} ({time.monotonic() - began:.0f} s)")


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application, for a configuration that is only asked for its event loop."""


def _say(message: str, *, warn: bool = False) -> None:
    """A line for a person at a terminal; a line of the log where nobody watches."""
    if sys.stderr.isatty():
        print(f"quantkit: {'warning: ' if warn else ''}{message}", file=sys.stderr, flush=True)
    else:
        log_event(message, level=logging.WARNING if warn else logging.INFO)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the port but does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"host '{host}' is not known here: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        cut_unread_connections(listener)
        listener.bind(address)
    except OSError as error:
        listener.close()
        known = {errno.EADDRINUSE: "another process uses it; choose another --port", errno.EACCES: "not allowed"}
        why = known.get(error.errno or 0, error.strerror)
        raise InputError(f"cannot listen on {host} port {port}: {why}") from error
    return listener


def _check_tls(settings: ServerSettings) -> None:
    """A wrong file is found before the model is loaded."""
    if settings.tls_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_certfile, settings.tls_keyfile, password=""
        )
    except (OSError, ssl.SSLError) as error:
        files = f"{settings.tls_certfile} and {settings.tls_keyfile}"
        raise InputError(f"cannot use the TLS files {files}: {error.strerror or error}") from error
