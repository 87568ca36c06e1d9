"""Requests in, tokens out: `add`, then `step` until nothing is unfinished. One thread drives an engine.

    request -> scheduler -> runner -> sampler -> request

With overlap, a step is launched before the results of the one before are looked at: the host works while the device
computes. A sequence that turns out to have ended was then computed for one token too many, which is thrown away.
Where the model has several stages, as many steps are on their way as keep all stages at work.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random

from quantkit.devices import on_device
from quantkit.runtime.core.check_request import check_request
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import FinishReason, Guide, Sequence, Status
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.step_result import NO_TOKEN, PromptLogprobs, Sampled
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.device.kv_choice import KvChoice
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.device.peers import Alone, Peers
from quantkit.runtime.device.runner import InFlight, Runner
from quantkit.runtime.engine.page_pool import PagePool
from quantkit.runtime.engine.scheduler import Limits, Scheduler
from quantkit.runtime.engine.speculation import Speculation
from quantkit.runtime.engine.stop_conditions import why_ends
from quantkit.runtime.model.config import ModelConfig

PRIORITY_SECONDS = 10.0  # how much later a request counts as arrived for each level of lower priority


@dataclass
class Request:
    """A prompt with its n answers."""

    id: int
    prompt: list[int]
    params: SamplingParams
    arrived: float
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # in the order of positions, from 1 on

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

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
        speculation: Speculation | None = None,
        peers: Peers = Alone(),  # noqa: B008  (has no state)
        kv_choice: KvChoice | None = None,
    ) -> None:
        """`peers` are the other ranks, where there are any; they end with the engine. `kv_choice` says why its cache is
        of its kind."""
        self.config = config
        self.kv_choice = kv_choice
        self.options = options
        self.memory = plan
        pool = PagePool(plan.pages, plan.page_size, options.share_prefixes)
        limits = Limits(options.budget, options.sequences, swap_pages=plan.host_pages, micro_batches=options.in_stages)
        self.scheduler = Scheduler(pool, limits)
        self.runner = runner
        self.peers = peers
        weakref.finalize(self, peers.stop)
        self.requests: dict[int, Request] = {}
        self._owners: dict[int, tuple[Request, int]] = {}  # sequence id -> request, index
        self._ids = count()
        self._sequence_ids = count()
        self._random = Random(options.seed)
        self._staged = options.pipeline_parallel > 1
        self._ahead = options.in_stages - 1 if self._staged else int(options.overlaps)  # steps that need not be back
        self._in_flight: deque[InFlight] = deque()
        self._at_work: StepPlan | None = None  # the step that is being launched or looked at
        self._outputs: list[TokenOutput] = []  # what the present call of `step` has found so far
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
        return bool(self.requests) or bool(self._in_flight)

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

        `guides`, one for each of the n answers, restrict what may be answered. Stop strings are for those who make text
        of the tokens: see `OutputProcessor`.
        """
        prompt = list(prompt)
        check_request(prompt, params, self.memory.max_context, self.config.vocab)
        now = time.monotonic() if arrived is None else arrived
        request = Request(next(self._ids), prompt, params, now)
        seed = params.seed if params.seed is not None else self._random.getrandbits(62)
        room = self.memory.max_context - len(prompt)
        for index in range(params.n):
            sequence = Sequence(
                id=next(self._sequence_ids),
                prompt=prompt,
                params=params,
                rank=now + priority * PRIORITY_SECONDS,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                max_new=room if params.max_tokens is None else min(params.max_tokens, room),
                end_tokens=params.end_tokens(self.config.eos),
                leader=request.sequences[0] if index else None,
                needs_all_logits=params.prompt_logprobs is not None and index == 0,
                guide=guides[index] if guides else None,
                waits=self._staged,
            )
            self.speculation.add(sequence)
            request.sequences.append(sequence)
            self._owners[sequence.id] = (request, index)
            self.scheduler.add(sequence)
        self.requests[request.id] = request
        return request

    def abort(self, request_id: int, index: int | None = None) -> None:
        """Ends a request, or one of its n answers, at once; unknown or finished ones are left alone."""
        request = self.requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences if index is None else [request.sequences[index]]:
            if not sequence.finished:
                self._end(sequence, "abort")

    def step(self) -> list[TokenOutput]:
        """Launches the next step and brings what is ready: with overlap, the tokens of the step before.

        Where nobody can go on without these tokens, as in speculation, they are looked at first.
        """
        self._outputs = []
        with on_device(self.runner.device):  # whichever thread this is
            if self._in_flight and self._nobody_can_go_on():
                self._take(self._in_flight.popleft())
            launched = self._launch()
            if launched is not None:
                self._in_flight.append(launched)
            if len(self._in_flight) > (self._ahead if launched is not None else 0):
                self._take(self._in_flight.popleft())
        return self._outputs

    def _nobody_can_go_on(self) -> bool:
        """Without the results of the oldest step. Through stages, others may start meanwhile."""
        if self._staged and self.scheduler.waiting:
            return False
        return all(sequence.must_wait for sequence in self.scheduler.running)

    def _launch(self) -> InFlight | None:
        self.speculation.propose(self.scheduler.running)
        plan = self._at_work = self.scheduler.schedule()
        self.runner.prepare(plan)
        if not plan.scheduled:  # everybody gave way, perhaps to host memory
            self._at_work = None
            return None
        now = time.monotonic()
        for work in plan.scheduled:
            if work.sequence.started is None:
                work.sequence.started = now
        plan = self.speculation.begin(plan)
        self.steps += 1
        flight = self.runner.launch(plan)
        if flight.launched is not None:
            self.speculation.follow(flight.launched)
        self._at_work = None
        return flight

    def recover(self, why: str) -> list[TokenOutput]:
        """After `step` has raised: the answers of that step end with an error, the others go on. Gives what `step` had
        found before, too.

        Nothing is believed of what the step should have written. Raises AssertionError where the engine is not in order
        then, or where nobody knows which step failed; with other ranks, which are in the middle of it, always.
        """
        plan, self._at_work = self._at_work, None
        assert plan is not None, "no step was at work"
        assert isinstance(self.peers, Alone), "other ranks are in the middle of the step"
        self.scheduler.undo(plan)
        for sequence in [work.sequence for work in plan.scheduled if not work.sequence.finished]:
            self._give_up(sequence, why)
        self.runner.forget_step()
        self.speculation.drop_steps(len(self._in_flight))
        self.check_integrity()
        return self._outputs

    def drain(self) -> None:
        """Waits for what is still on its way when all requests have finished: steps that were one too many."""
        while self._in_flight:
            self.step()

    def check(self) -> None:
        """Raises the reason where another rank has died."""
        self.peers.check()

    def when_broken(self, call: Callable[[], None]) -> None:
        """`call` is called, from another thread, when another rank has died."""
        self.peers.when_broken(call)

    def close(self) -> None:
        """Ends the other ranks, where there are any; the engine answers no more then."""
        self.peers.stop()

    def forget(self) -> None:
        """Empties the prefix cache and sets the counters back, as if nothing had run."""
        assert not self.busy, "somebody is being answered"
        self.scheduler.pool.reset_contents()
        self.scheduler.prompt_tokens = self.scheduler.reused_tokens = self.scheduler.preemptions = 0
        self.steps = self.generated = 0
        self.speculation.reset()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within, what runs leaves nothing behind: nobody shares its pages, and counters are then what they were."""
        assert not self.busy, "somebody is being answered"
        scheduler, pool = self.scheduler, self.scheduler.pool
        counted = scheduler.prompt_tokens, scheduler.reused_tokens, scheduler.preemptions
        own, shares, pool.share_prefixes = (self.steps, self.generated), pool.share_prefixes, False
        try:
            with on_device(self.runner.device), self.speculation.unrecorded():
                yield
        finally:
            pool.share_prefixes = shares
            scheduler.prompt_tokens, scheduler.reused_tokens, scheduler.preemptions = counted
            self.steps, self.generated = own

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.unfinished == len(self._owners)

    def _take(self, flight: InFlight) -> None:
        self._at_work = flight.plan
        ready = self.runner.arrived(flight)
        for sequence_id, found in ready.prompts.items():
            if sequence_id in self._owners:
                self._owners[sequence_id][0].add_prompt_logprobs(found)
        outcomes = self.runner.collect(ready)
        if ready.plan.has_trees:
            self.runner.keep_paths(outcomes)
        self.speculation.end(ready, outcomes)
        finished = Status.FINISHED
        for work, tokens, path, _ in outcomes:
            sequence, accepted = work.sequence, len(tokens) - 1
            self.scheduler.settle(work, accepted, accepted == 0 or path == tuple(range(accepted)))
            for sampled in tokens:
                if sequence.status is not finished:
                    self._advance(sequence, sampled)
        self._at_work = None

    def _advance(self, sequence: Sequence, sampled: Sampled) -> None:
        """A token has arrived: what it means for its sequence."""
        token, tokens = sampled.token, sequence.tokens
        if token == NO_TOKEN:
            self.scheduler.pool.withdraw(sequence.pages)
            self._give_up(sequence, "the model's logits are not finite")
            return
        request, index = self._owners[sequence.id]
        tokens.append(token)
        self.generated += 1
        if len(tokens) % self.memory.page_size == 0:
            self.scheduler.publish(sequence)
        reason, cause = why_ends(sequence, token, self.config.eos)
        if reason is not None:
            self._end(sequence, reason)
        found = TokenOutput(request.id, index, token, sampled.logprob, sampled.top, reason, cause)
        self._outputs.append(found)

    def _give_up(self, sequence: Sequence, why: str) -> None:
        request, index = self._owners[sequence.id]
        self._end(sequence, "error")
        self._outputs.append(TokenOutput(request.id, index, None, finished="error", stop_reason=why))

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """One of the answers to a request; with the last of them the request is gone."""
        self.scheduler.finish(sequence, reason)
        self.speculation.forget(sequence)
        request, _ = self._owners.pop(sequence.id)
        if request.finished:
            del self.requests[request.id]
