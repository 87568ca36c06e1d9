"""Requests in, tokens out: `add`, then `step` until nothing is unfinished. One thread drives an engine.

    request -> scheduler -> runner -> sampler -> request

With overlap, a step is launched before the results of the one before are looked at: the host works while the device
computes. A sequence that turns out to have ended was then computed for one token too many, which is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.memory import MemoryPlan
from quantkit.runtime.model_config import ModelConfig
from quantkit.runtime.options import EngineOptions
from quantkit.runtime.params import SamplingParams
from quantkit.runtime.pool import PagePool
from quantkit.runtime.prompt_logprobs import PromptLogprobs
from quantkit.runtime.runner import Launched, Runner, Sampled
from quantkit.runtime.scheduler import Limits, Scheduler
from quantkit.runtime.sequence import FinishReason, Guide, Sequence
from quantkit.runtime.speculation.speculation import Speculation
from quantkit.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRIORITY_SECONDS = 10.0  # how much later a request counts as arrived for each level of lower priority
_CONTEXT_TOKENS = 8  # of the prompt, that a text stream needs to place the first space


@dataclass(frozen=True)
class Delta:
    """One new token of one sequence, and the text that it made complete; or its end."""

    request: int
    index: int  # which of the n answers
    token: int | None
    text: str = ""
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finished: FinishReason | None = None
    stop_reason: int | str | None = None  # the token or string that ended it, where that was not the model's own end


@dataclass
class Request:
    """A prompt with its n answers."""

    id: int
    prompt: list[int]
    params: SamplingParams
    arrived: float
    sequences: list[Sequence] = field(default_factory=list)
    streams: list[TextStream | None] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # in the order of positions, from 1 on

    @property
    def finished(self) -> bool:
        return all(sequence.finished is not None for sequence in self.sequences)

    def add_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """What is new in them: after a preemption, the prompt is computed again, in other chunks."""
        known = self.prompt_logprobs[-1].end if self.prompt_logprobs else 1
        if found.end > known:
            self.prompt_logprobs.append(found.since(known))


class Engine:
    def __init__(
        self,
        config: ModelConfig,
        runner: Runner,
        plan: MemoryPlan,
        options: EngineOptions,
        tokenizer: PreTrainedTokenizerBase | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.memory = plan
        self.tokenizer = tokenizer
        pool = PagePool(plan.pages, plan.page_size, options.share_prefixes)
        swap_pages = int(options.swap_gib * 2**30) // plan.page_bytes
        self.scheduler = Scheduler(pool, Limits(options.budget, options.sequences, swap_pages=swap_pages))
        self.runner = runner
        self.requests: dict[int, Request] = {}
        self._owners: dict[int, tuple[Request, int]] = {}  # sequence id -> request, index
        self._ids = count()
        self._sequence_ids = count()
        self._random = Random(options.seed)
        self._in_flight: Launched | None = None
        self.speculation = speculation or Speculation()
        self.steps = 0
        self.generated = 0  # tokens

    @property
    def unfinished(self) -> int:
        """Requests that will still bring something."""
        return len(self.requests)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self.requests) or self._in_flight is not None

    def add(
        self,
        prompt: Ordered[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrived: float | None = None,
        guides: Ordered[Guide] = (),
    ) -> Request:
        """Takes a request, or refuses it with an InputError; what runs is not disturbed. Lower priority goes first.

        `guides`, one for each of the n answers, restrict what may be answered.
        """
        prompt = list(prompt)
        check_request(prompt, params, self.memory.max_context, self.config.vocab)
        if params.stop and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, which this model folder lacks; use stop_token_ids")
        now = time.monotonic() if arrived is None else arrived
        request = Request(next(self._ids), prompt, params, now)
        seed = params.seed if params.seed is not None else self._random.getrandbits(62)
        room = self.memory.max_context - len(prompt)
        ends = () if params.ignore_eos else self.config.eos
        for index in range(params.n):
            sequence = Sequence(
                id=next(self._sequence_ids),
                prompt=prompt,
                params=params,
                rank=now + priority * PRIORITY_SECONDS,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                max_new=room if params.max_tokens is None else min(params.max_tokens, room),
                end_tokens=tuple({*ends, *params.stop_token_ids}),
                leader=request.sequences[0] if index else None,
                needs_all_logits=params.prompt_logprobs is not None and index == 0,
                guide=guides[index] if guides else None,
            )
            sequence.speculates = self.speculation.on
            request.sequences.append(sequence)
            request.streams.append(self._stream(prompt, params))
            self._owners[sequence.id] = (request, index)
            self.scheduler.add(sequence)
        self.requests[request.id] = request
        return request

    def abort(self, request_id: int) -> None:
        """Ends a request at once; unknown or finished ones are left alone."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            for sequence in request.sequences:
                self._end(sequence, "abort")

    def step(self) -> list[Delta]:
        """Launches the next step and brings what is ready: with overlap, the tokens of the step before.

        Where nobody can go on without these tokens, as in speculation, they are looked at first.
        """
        deltas: list[Delta] = []
        if self._in_flight is not None and all(sequence.must_wait for sequence in self.scheduler.running):
            ready, self._in_flight = self._in_flight, None
            deltas = self._take(ready)
        launched = self._launch()
        if not self.options.overlaps:
            return deltas if launched is None else deltas + self._take(launched)
        ready_now, self._in_flight = self._in_flight, launched
        return deltas if ready_now is None else deltas + self._take(ready_now)

    def _launch(self) -> Launched | None:
        self.speculation.propose(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.runner.prepare(plan)
        if not plan.shares:  # everybody gave way, perhaps to host memory
            return None
        now = time.monotonic()
        for share in plan.shares:
            share.sequence.started = share.sequence.started or now
        self.speculation.begin(plan)
        self.steps += 1
        return self.runner.launch(plan)

    def drain(self) -> None:
        """Waits for what is still on its way when all requests have finished: steps that were one too many."""
        while self._in_flight is not None:
            self.step()

    def forget(self) -> None:
        """Empties the prefix cache and sets the counters back, as if nothing had run."""
        assert not self.busy, "somebody is being answered"
        self.scheduler.pool.reset_contents()
        self.scheduler.prompt_tokens = self.scheduler.reused_tokens = self.scheduler.preemptions = 0
        self.steps = self.generated = 0
        self.speculation.reset()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.unfinished == len(self._owners)

    def _stream(self, prompt: list[int], params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer,
            prompt_ids=prompt[-_CONTEXT_TOKENS:],
            stop=tuple(params.stop),
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _take(self, ready: Launched) -> list[Delta]:
        for sequence_id, found in ready.prompts.items():
            if sequence_id in self._owners:
                self._owners[sequence_id][0].add_prompt_logprobs(found)
        deltas = []
        outcomes = self.runner.collect(ready, self.speculation.accepts)
        if ready.plan.has_trees:
            self.runner.keep_paths(outcomes)
        self.speculation.end(ready, outcomes)
        for outcome in outcomes:
            sequence = outcome.share.sequence
            sequence.pending -= 1
            if sequence.finished is None:
                in_order = outcome.path == tuple(range(outcome.accepted))
                self.scheduler.settle(outcome.share, outcome.accepted, in_order)
                self.speculation.see(outcome)
            for sampled in outcome.tokens:
                if sequence.finished is None:
                    deltas.append(self._advance(sequence, sampled))
        return deltas

    def _advance(self, sequence: Sequence, sampled: Sampled) -> Delta:
        """A token has arrived: what it means for its sequence."""
        request, index = self._owners[sequence.id]
        sequence.tokens.append(sampled.token)
        self.generated += 1
        self.scheduler.publish(sequence)
        reason, cause, text = self._judge(sequence, sampled.token, request.streams[index])
        if reason is not None:
            self._end(sequence, reason)
            if request.finished:
                del self.requests[request.id]
        return Delta(request.id, index, sampled.token, text, sampled.logprob, sampled.top, reason, cause)

    def _judge(
        self, sequence: Sequence, token: int, stream: TextStream | None
    ) -> tuple[FinishReason | None, int | str | None, str]:
        """Why a sequence ends with this token, what caused it, and the text that can be shown."""
        if token in sequence.end_tokens:
            own = token in self.config.eos
            return "stop", None if own else token, stream.finish() if stream else ""
        if sequence.guide is not None:
            try:
                sequence.guide.advance(token)
            except QuantkitError:  # the grammar became too complex: the answer cannot be trusted
                return "error", None, stream.finish() if stream else ""
            if sequence.guide.finished:
                return "stop", None, (stream.push(token) + stream.finish()) if stream else ""
        text = stream.push(token) if stream else ""
        if stream is not None and stream.stopped:
            return "stop", stream.stop_reason, text
        if len(sequence.answer) >= sequence.max_new:
            return "length", None, text + (stream.finish() if stream else "")
        return None, None, text

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self._owners.pop(sequence.id, None)
        self.speculation.forget(sequence)


def check_request(prompt: list[int], params: SamplingParams, max_context: int, vocab: int) -> None:
    """Refuses what an engine of these sizes cannot answer."""
    if not prompt:
        raise InputError("the prompt is empty; give at least one token")
    if len(prompt) >= max_context:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, but contexts end at {max_context}, the answer included; shorten it"
        )
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab:
            raise InputError(f"token id {token!r} is not in the vocabulary of {vocab} tokens")
    params.check_vocabulary(vocab)
