"""The engine process of the server. FD is its end of a socket:

    python -m quantkit.runtime.server.engine_process.process FD

It first reads what to serve, then answers `add` and `abort`. One thread reads, one writes, one compiles grammars, the
main one steps; so neither a slow server, a long message nor a hard grammar stalls a step. When the other side goes, it
goes.

    in    {"serve": {"model", "options"}}, {"add": {"id", "prompt", "params", "priority", "guide"}},
          {"abort": id, "index": of one of its answers, or null}
    out   {"ready": info} or {"failed": text, "code"}, {"refused": id, "why"}, {"outputs": [...]}, {"stats": {...}},
          {"prompt_logprobs": {"id", "logprobs", "top"}}, {"fault": {"why", "ended": answers}},
          {"alive": seconds that the present step has taken so far}, once a second
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.core import framing
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.core.watermark import Watermark
from quantkit.runtime.device.kernel_basis import kernel_basis
from quantkit.runtime.device.peers import Alone
from quantkit.runtime.engine.engine import Engine, Request
from quantkit.runtime.known_answer import KnownAnswer
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.parallel.launcher import Launcher
from quantkit.runtime.startup import start_engine
from quantkit.runtime.warm_up import Rehearsal, all_parts
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from quantkit.runtime.sampling.structured_output import GuideCompiler

STATS_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
PROMPT_PART = 512  # tokens of a prompt whose log-probabilities are one message
LONGEST_REASON = 300  # characters of an error that clients and the log see


class EngineLoop:
    """An engine that takes its requests from messages."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        outbox: queue.Queue[framing.Message | None],
        rehearsal: Rehearsal | None = None,
    ) -> None:
        """`rehearsal`: what is done while nobody asks."""
        self._engine = engine
        self._model = model
        self._rehearsal = rehearsal or Rehearsal(engine, [])
        self._outbox = outbox
        self._names: dict[int, int] = {}  # the engine's id of a request -> the server's
        self._requests: dict[int, Request] = {}  # by the server's id
        self._compiler: GuideCompiler | None = None
        self._compiling: set[int] = set()  # requests whose guides are being made, by the server's id
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._inbox: queue.Queue[framing.Message | None] = queue.Queue()
        self._known_answer = KnownAnswer(engine) if isinstance(engine.peers, Alone) else None
        self._sent_stats = 0.0
        self._began: float | None = None  # when the present step did

    @property
    def step_takes(self) -> float:
        """Seconds so far; 0 between steps. For other threads."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def run(self, inbox: queue.Queue[framing.Message | None]) -> None:
        """Until the inbox brings None."""
        self._inbox = inbox
        while True:
            try:
                message = inbox.get_nowait() if self._engine.busy or self._rehearsal.left else inbox.get()
            except queue.Empty:
                self._step() if self._engine.busy else self._rehearse()
                continue
            if message is None:
                return
            self._take(message)

    def _take(self, message: framing.Message) -> None:
        if "add" in message:
            self._add(message["add"])
        elif "compiled" in message:
            self._add_guided(message["compiled"], message["guides"])
        elif "abort" in message:
            self._abort(message["abort"], message["index"])
        elif "broken" in message:
            self._engine.check()

    def _add(self, wanted: dict[str, Any]) -> None:
        """At once, or when its guides are there: until then the request waits alone."""
        if wanted["guide"] is None:
            self._admit(wanted, [])
            return
        self._compiling.add(wanted["id"])
        self._threads.submit(self._compile, wanted)

    def _compile(self, wanted: dict[str, Any]) -> None:
        """In a thread of its own: the first guide loads the tokenizer, and a grammar may take seconds."""
        try:
            found: list[Any] | QuantkitError = self._guides(wanted["guide"], wanted["params"]["n"])
        except QuantkitError as error:
            found = error
        except Exception as error:
            found = QuantkitError(f"the structured output cannot be prepared: {_in_one_line(error)}")
        self._inbox.put({"compiled": wanted, "guides": found})

    def _add_guided(self, wanted: dict[str, Any], guides: list[Any] | QuantkitError) -> None:
        if wanted["id"] not in self._compiling:  # aborted meanwhile
            return
        self._compiling.discard(wanted["id"])
        if isinstance(guides, QuantkitError):
            self._outbox.put({"refused": wanted["id"], "why": str(guides)})
        else:
            self._admit(wanted, guides)

    def _admit(self, wanted: dict[str, Any], guides: list[Any]) -> None:
        try:
            params = _sampling_params(wanted["params"])
            request = self._engine.add(wanted["prompt"], params, priority=wanted["priority"], guides=guides)
        except QuantkitError as error:
            self._outbox.put({"refused": wanted["id"], "why": str(error)})
            return
        self._requests[wanted["id"]] = request
        self._names[request.id] = wanted["id"]

    def _abort(self, name: int, index: int | None) -> None:
        """One of the n answers, or all of them where `index` is None. What has ended is not known here any more."""
        if index is None:
            self._compiling.discard(name)
        request = self._requests.get(name)
        if request is not None:
            self._engine.abort(request.id, index)
            if request.finished:
                del self._requests[name], self._names[request.id]
        self._send_stats()

    def _guides(self, spec: dict[str, Any], count: int) -> list[Any]:
        from quantkit.runtime.sampling.structured_output import (  # a library that few requests need
            GuideCompiler,
            GuideSpec,
        )

        if self._compiler is None:
            tokenizer = load_tokenizer(model_folder(self._model))
            if tokenizer is None:
                raise InputError("structured output needs a tokenizer, which this model folder lacks")
            self._compiler = GuideCompiler(tokenizer, self._engine.config.vocab, self._engine.config.eos)
        return [self._compiler.compile(GuideSpec(**spec)) for _ in range(count)]

    def _step(self) -> None:
        self._began = time.monotonic()
        try:
            found = self._engine.step()
        except QuantkitError:  # another rank has died
            raise
        except Exception as error:
            found = self._recovered(error)
        self._began = None
        outputs = [output for output in found if output.request in self._names]
        rows = [self._row(output) for output in outputs]
        for output in outputs:
            if output.request not in self._engine.requests and output.request in self._names:
                del self._requests[self._names.pop(output.request)]
        if rows:
            self._outbox.put({"outputs": rows})
        if not self._engine.busy or time.monotonic() - self._sent_stats > STATS_SECONDS:
            self._send_stats()

    def _rehearse(self) -> None:
        """A part, of which a request that comes meanwhile waits for the end. One that fails is the last."""
        self._began = time.monotonic()
        try:
            self._rehearsal.step()
        except QuantkitError:  # another rank has died
            raise
        except Exception as error:
            self._rehearsal.stop()
            self._recovered(error)
            for number in list(self._engine.requests):  # the other prompts of the part
                self._engine.abort(number)
        self._began = None
        self._send_stats()

    def _recovered(self, error: Exception) -> list[TokenOutput]:
        """A step failed: its answers end, and the others go on if the engine can prove itself. Else it ends."""
        why = f"a step of the engine failed: {_in_one_line(error)}"
        try:
            outputs = self._engine.recover(why)
            assert self._known_answer is not None
            self._known_answer.check()
        except Exception:
            traceback.print_exc()
            raise error from None
        self._outbox.put({"fault": {"why": why, "ended": len(outputs)}})
        return outputs

    def _row(self, output: TokenOutput) -> list[Any]:
        """[id, index, token, finished, stop_reason, logprob, top], and where there is something to say behind them:
        [queued seconds, cached tokens] of a first token or None, and [guessed, accepted] tokens of the answer so far.
        """
        name = self._names[output.request]
        request = self._requests[name]
        sequence = request.sequences[output.index]
        row: list[Any] = [name, output.index, output.token, output.finished, output.stop_reason]
        row += [output.logprob, output.top]
        first = None
        if output.token is not None and sequence.num_answered == 1:
            first = [(sequence.started or request.arrived) - request.arrived, sequence.num_reused]
            if output.index == 0 and request.params.prompt_logprobs is not None:
                self._send_prompt_logprobs(name, request)
        if sequence.num_guessed:
            return [*row, first, [sequence.num_guessed, sequence.num_accepted]]
        return row if first is None else [*row, first]

    def _send_prompt_logprobs(self, name: int, request: Request) -> None:
        """In parts: the server reads one message at a time, and others wait while it does."""
        logprobs = [None, *(value for part in request.prompt_logprobs for value in part.logprobs)]
        top = [[], *(row for part in request.prompt_logprobs for row in part.top)]
        for start in range(0, len(logprobs), PROMPT_PART):
            part = slice(start, start + PROMPT_PART)
            self._outbox.put({"prompt_logprobs": {"id": name, "logprobs": logprobs[part], "top": top[part]}})

    def _send_stats(self) -> None:
        self._sent_stats = time.monotonic()
        scheduler, pool = self._engine.scheduler, self._engine.scheduler.pool
        speculation = self._engine.speculation
        stats = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_pages_used": pool.usable - pool.free,
            "kv_pages_total": pool.usable,
            "prompt_tokens": scheduler.prompt_tokens,
            "reused_tokens": scheduler.reused_tokens,
            "generated_tokens": self._engine.generated,
            "preemptions": scheduler.preemptions,
            "steps": self._engine.steps,
            "draft_steps": speculation.steps,
            "guessed_tokens": speculation.guessed,
            "accepted_tokens": speculation.accepted,
            "saved_seconds": speculation.saved_seconds,
            "rehearsing": self._rehearsal.next,
            "rehearsal_left": self._rehearsal.left,
        }
        self._outbox.put({"stats": stats})


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    """As the server has sent them."""
    mark = given.get("watermark")
    rest = {"logit_bias": dict(given["logit_bias"]), "watermark": None if mark is None else Watermark(**mark)}
    return SamplingParams(**given | rest)


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def describe(engine: Engine, model: str) -> dict[str, Any]:
    """What `EngineInfo` holds."""
    from quantkit.inspection import inspect_checkpoint

    found = inspect_checkpoint(model_folder(model))
    schemes = sorted(found.schemes)
    memory, options = engine.memory, engine.options
    dtype = str(engine.runner.decoder.weights.dtype)[6:]
    return {
        "model": model,
        "format": ", ".join(schemes or [dtype]) + options.as_told,
        "bits": found.quantized_bits_per_weight,
        "device": str(options.torch_device),
        "dtype": dtype,
        "kv_dtype": engine.runner.cache.kind.label,
        "kv_reason": "" if engine.kv_choice is None else engine.kv_choice.reason,
        "weights_bytes": memory.weights,
        "kv_tokens": memory.kv_tokens,
        "page_size": memory.page_size,
        "max_context": memory.max_context,
        "vocab": engine.config.vocab,
        "eos": list(engine.config.eos),
        "max_sequences": options.sequences,
        "speculates": engine.speculation.on,
        "kernels": kernel_basis(engine.runner.decoder.weights),
    }


def rehearsal_of(engine: Engine) -> Rehearsal:
    """What is left to rehearse when an engine is ready."""
    rehearses = engine.options.warm_up == "background" and engine.options.on_gpu
    return Rehearsal(engine, all_parts(engine) if rehearses else [])


def main(
    descriptor: int,
    launcher: Launcher | None = None,
    left_to_rehearse: Callable[[Engine], Rehearsal] = rehearsal_of,
) -> None:
    """Serves over a socket. `launcher` starts the other ranks of the engine, where not this machine does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach the whole group: the server decides when to end
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    inbox: queue.Queue[framing.Message | None] = queue.Queue()
    outbox: queue.Queue[framing.Message | None] = queue.Queue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    writer = threading.Thread(target=_write, args=(connection, outbox), daemon=True)
    writer.start()
    first = inbox.get()
    if first is None:
        return
    wanted = first["serve"]
    try:
        engine = start_engine(wanted["model"], EngineOptions(**wanted["options"]), launcher=launcher)
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked at again
        engine.when_broken(lambda: inbox.put({"broken": True}))
        rehearsal = left_to_rehearse(engine)
        left = {"rehearsing": rehearsal.next, "rehearsal_left": rehearsal.left}
        outbox.put({"ready": describe(engine, wanted["model"]) | left})
    except QuantkitError as error:
        outbox.put({"failed": str(error), "code": error.exit_code})
    else:
        loop = EngineLoop(engine, wanted["model"], outbox, rehearsal)
        threading.Thread(target=_give_signs_of_life, args=(loop, outbox), daemon=True).start()
        code = _serve(loop, inbox)
        engine.close()
        if code:  # with what stands in the outbox: nobody takes the answers of half an engine
            os._exit(code)
    outbox.put(None)
    writer.join(timeout=5)
    os._exit(0)  # threads of libraries may not want to end


def _give_signs_of_life(loop: EngineLoop, outbox: queue.Queue[framing.Message | None]) -> None:
    while True:
        outbox.put({"alive": loop.step_takes})
        time.sleep(HEARTBEAT_SECONDS)


def _serve(loop: EngineLoop, inbox: queue.Queue[framing.Message | None]) -> int:
    """Until the inbox brings None, or a rank dies: says why, and gives the exit code."""
    try:
        loop.run(inbox)
    except QuantkitError as error:
        print(f"quantkit: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _read(connection: socket.socket, inbox: queue.Queue[framing.Message | None]) -> None:
    while (message := framing.read_message(connection)) is not None:
        inbox.put(message)
    inbox.put(None)


def _write(connection: socket.socket, outbox: queue.Queue[framing.Message | None]) -> None:
    try:
        while (message := outbox.get()) is not None:
            connection.sendall(framing.pack_message(message))
    except OSError:  # the server is gone, and the reader has seen it too
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
