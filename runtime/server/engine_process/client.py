"""The server's side of the engine process: starts it, watches over it, starts it again when it dies.

Requests go out as messages and come back as tokens, one message a step for all of them. When the process dies, every
open request ends with `EngineDied` at once and `ready` is false until a new process has loaded the model. A process
without a sign of life, or whose step does not end, is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.core import framing
from quantkit.runtime.core.check_request import check_request
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.server.engine_process.pending import EngineDied, PendingRequest

if TYPE_CHECKING:
    from quantkit.runtime.sampling.structured_output import GuideSpec

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a new process; doubled while it dies at once
STABLE_SECONDS = 60.0  # a process that lived so long starts anew without a pause
SILENT_SECONDS = 30.0  # without a sign of life, of which there is one each second (`process.HEARTBEAT_SECONDS`)
STEP_SECONDS = 300.0  # the longest that a step may take
LOOK_SECONDS = 1.0  # between looks at the signs of life


@dataclass(frozen=True)
class EngineInfo:
    """What is served."""

    model: str
    format: str
    bits: float | None  # of quantized weights, scales and all
    device: str
    dtype: str
    kv_dtype: str
    weights_bytes: int
    kv_tokens: int
    page_size: int
    max_context: int
    vocab: int
    eos: tuple[int, ...]
    max_sequences: int
    speculates: bool = False
    kernels: str | None = None  # what their choice rests on, on a GPU
    kv_reason: str = ""  # why the cache is in `kv_dtype`


@dataclass(frozen=True)
class EngineStats:
    """The newest numbers of the engine process."""

    running: int = 0
    waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    draft_steps: int = 0  # in which guesses were verified, counted for each answer
    guessed_tokens: int = 0
    accepted_tokens: int = 0  # of these
    saved_seconds: float = 0.0  # by guesses; below 0 where they cost more than they brought
    rehearsing: str = ""  # the part of the rehearsal that comes next
    rehearsal_left: int = 0  # parts


class EngineClient:
    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        *,
        guides: bool = True,
        silent_seconds: float = SILENT_SECONDS,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        """`options` are those of EngineOptions. Without `guides`, structured output is refused."""
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.restarts = 0
        self.failure: str | None = None  # why there is no engine now
        self.troubles: list[dict[str, Any]] = []  # for the log: what happened, and what is known of it
        self.ready = False
        self._model = model
        self._options = options
        self._guides = guides
        self._ids = count()
        self._open: dict[int, PendingRequest] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self._silent_seconds = silent_seconds
        self._step_seconds = step_seconds
        self._heard = 0.0  # when the process last said something
        self._step_takes = 0.0  # seconds, by its last sign of life

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def why_not_ready(self) -> str:
        reason = "" if self.failure is None else f" ({self.failure})"
        return f"the engine is not ready{reason}; try again in a moment"

    async def start(self) -> None:
        """Returns when the engine is ready; raises what kept it from starting."""
        reader = await self._spawn()
        await self._wait_until_ready(reader)
        self._watch = asyncio.create_task(self._supervise(reader))

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Waits for open requests as long as that, then ends the process."""
        self._closing = True
        if not self.ready:  # it loads, and would not notice
            self._kill()
        end = time.monotonic() + drain_seconds
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.ready = False
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        self._fail_all("the server is shutting down")
        await self._end_process()

    def submit(
        self, prompt: list[int], params: SamplingParams, *, priority: int = 0, guide: GuideSpec | None = None
    ) -> PendingRequest:
        """Hands a request to the engine. Stop strings are the caller's business: the engine sees tokens only."""
        if not self.ready or self._writer is None or self.info is None:
            raise EngineDied(self.why_not_ready)
        if guide is not None and not self._guides:
            raise InputError("structured output is switched off on this server")
        check_request(prompt, params, self.info.max_context, self.info.vocab)
        pending = PendingRequest(self, next(self._ids), params.n)
        self._open[pending.request_id] = pending
        wanted = {
            "id": pending.request_id,
            "prompt": prompt,
            "params": asdict(replace(params, stop=())),
            "priority": priority,
            "guide": None if guide is None else asdict(guide),
        }
        self._send({"add": wanted})
        return pending

    def forget(self, request_id: int, index: int | None = None) -> None:
        """The engine stops computing a request, or one of its answers; those that have ended are left alone."""
        pending = self._open.get(request_id)
        if pending is None or (index is not None and index not in pending.unanswered):
            return
        self._ended(pending, index)
        if self._writer is not None:
            self._send({"abort": request_id, "index": index})

    def _ended(self, pending: PendingRequest, index: int | None) -> None:
        """An answer, or all of them."""
        pending.unanswered -= pending.unanswered.copy() if index is None else {index}
        if not pending.unanswered:
            del self._open[pending.request_id]

    def _send(self, message: framing.Message) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(framing.pack_message(_plain(message)))

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await self._start_process(theirs)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=framing.LARGEST)
        self._send({"serve": {"model": self._model, "options": self._options}})
        return reader

    async def _start_process(self, connection: socket.socket) -> asyncio.subprocess.Process:
        return await start_module("quantkit.runtime.server.engine_process.process", connection)

    async def _wait_until_ready(self, reader: asyncio.StreamReader) -> None:
        try:
            first = await framing.read_message_async(reader)
        except (asyncio.IncompleteReadError, ConnectionError):  # the latter where it has not even read what to serve
            code = await self._process.wait() if self._process else None
            raise EngineDied(f"the engine process ended before it was ready (exit code {code})") from None
        if "failed" in first:
            await self._end_process()
            raise (InputError if first["code"] == InputError.exit_code else QuantkitError)(first["failed"])
        info = first["ready"] | {"eos": tuple(first["ready"]["eos"])}
        left = {name: info.pop(name) for name in ("rehearsing", "rehearsal_left") if name in info}
        self.info = EngineInfo(**info)
        total = self.info.kv_tokens // self.info.page_size
        self.stats = EngineStats(kv_pages_total=total, **left)
        self.ready = True

    async def _supervise(self, reader: asyncio.StreamReader) -> None:
        """Reads until the process is gone, then starts another one, for ever."""
        pause = 0.0
        while True:
            began = time.monotonic()
            self.failure = await self._read_watched(reader)
            self.ready = False
            self._fail_all(f"{self.failure}; it is being restarted")
            self.restarts += 1
            pause = 0.0 if time.monotonic() - began >= STABLE_SECONDS else _longer(pause)
            reader = await self._start_again(pause)

    async def _start_again(self, pause: float) -> asyncio.StreamReader:
        """Tries until there is an engine, whatever goes wrong: nobody else would."""
        while True:
            try:
                await self._end_process()
                await asyncio.sleep(pause)
                reader = await self._spawn()
                await self._wait_until_ready(reader)
            except Exception as error:
                pause = _longer(pause)
                self.failure = f"it does not start: {error or type(error).__name__}"
                self._tell("the engine does not start", why=str(error), next_attempt_seconds=pause)
            else:
                self.failure = None
                return reader

    async def _read_watched(self, reader: asyncio.StreamReader) -> str:
        """Until the process is gone, or given up. Says why."""
        reading = asyncio.ensure_future(self._read(reader))
        looking = asyncio.ensure_future(self._look_for_life())
        try:
            await asyncio.wait({reading, looking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            looking.cancel()
            ended = await asyncio.gather(reading, looking, return_exceptions=True)
        return next((end for end in ended if isinstance(end, str)), "the engine process died")

    async def _read(self, reader: asyncio.StreamReader) -> str:
        self._heard, self._step_takes = time.monotonic(), 0.0
        try:
            while True:
                self._take(await framing.read_message_async(reader))
                self._heard = time.monotonic()
        except (asyncio.IncompleteReadError, ConnectionError):
            return "the engine process died"
        except Exception as error:  # what it says cannot be understood: another one may be better
            self._tell("the engine says what nobody understands", why=repr(error))
            self._kill()
            return "the engine process failed"

    async def _look_for_life(self) -> str:
        """Returns when the process is taken for hung; it is killed then."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now - asleep > 2 * LOOK_SECONDS:  # this process did not run either, so it cannot have heard anything
                self._heard = now
            silent = now - self._heard
            if silent > self._silent_seconds or self._step_takes > self._step_seconds:
                self._tell("the engine hangs", silent_seconds=round(silent, 1), step_seconds=round(self._step_takes, 1))
                self._kill()
                return "the engine process hung"

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _tell(self, event: str, **known: Any) -> None:
        self.troubles.append({"event": event, **known})

    def _take(self, message: framing.Message) -> None:
        if "alive" in message:
            self._step_takes = message["alive"]
        elif "outputs" in message:
            for row in message["outputs"]:
                self._deliver(row)
        elif "stats" in message:
            self.stats = EngineStats(**message["stats"])
        elif "prompt_logprobs" in message:
            found = message["prompt_logprobs"]
            pending = self._open.get(found["id"])
            if pending is not None:
                pending.prompt_logprobs += found["logprobs"]
                pending.prompt_top_logprobs += found["top"]
        elif "fault" in message:
            self._tell("a step failed", **message["fault"])
        elif "refused" in message:
            pending = self._open.pop(message["refused"], None)
            if pending is not None:
                pending.put(InputError(message["why"]))

    def _deliver(self, row: list[Any]) -> None:
        """See `process.EngineLoop._row`."""
        name, index, token, finished, stop_reason, logprob, top, *more = row
        first, guesses = (*more, None, None)[:2]
        pending = self._open.get(name)
        if pending is None or index not in pending.unanswered:  # aborted meanwhile
            return
        if first is not None:
            pending.queued_seconds, cached = first
            pending.cached_tokens = cached if index == 0 else pending.cached_tokens
        if guesses is not None:
            pending.guesses[index] = guesses[0], guesses[1]
        pairs = None if top is None else [(one, value) for one, value in top]
        pending.put(TokenOutput(name, index, token, logprob, pairs, finished, stop_reason))
        if finished is not None:
            self._ended(pending, index)

    def _fail_all(self, why: str) -> None:
        for pending in self._open.values():
            pending.put(EngineDied(why))
        self._open.clear()

    async def _end_process(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            try:
                async with asyncio.timeout(5):  # wait_for loses a cancellation that comes as the process ends
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            self._process = None


def _longer(pause: float) -> float:
    return min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)


def _plain(message: framing.Message) -> framing.Message:
    """Mappings with whole numbers as keys would become texts on the way."""
    wanted = message.get("add")
    if wanted is not None and wanted["params"]["logit_bias"]:
        pairs = list(wanted["params"]["logit_bias"].items())
        return {"add": wanted | {"params": wanted["params"] | {"logit_bias": pairs}}}
    return message


async def start_module(
    module: str, *connections: socket.socket, more: Sequence[str] = ()
) -> asyncio.subprocess.Process:
    """A Python process that inherits these connections; their numbers are its first arguments."""
    numbers = [connection.fileno() for connection in connections]
    command = [sys.executable, "-m", module, *map(str, numbers), *more]
    return await asyncio.create_subprocess_exec(*command, pass_fds=numbers, stdin=asyncio.subprocess.DEVNULL)
