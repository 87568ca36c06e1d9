"""Runs steps on the device. Nothing here waits for the device but `collect`.

A sequence has a row of the device's state while it runs: its pages and the last token sampled for it. The next step
reads that token there, so it can be launched before the host has seen it.

With several ranks this is rank 0: it tells the others each step, computes its own part, and samples. Where steps go
through several stages, a launched step is on its way until its rows come back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.runtime.core.sequence import Sequence, Status
from quantkit.runtime.core.step_plan import Scheduled, StepPlan
from quantkit.runtime.core.step_result import Launched, LogitsRows, Outcome, PromptLogprobs, Sampled, Samples, StepRows
from quantkit.runtime.device.decode_graphs import Key
from quantkit.runtime.device.keep_path import keep_path
from quantkit.runtime.device.model_part import ModelPart, to_host
from quantkit.runtime.device.peers import Alone, Peers, ReturningRows
from quantkit.runtime.device.step_inputs import InputMaker, PageMoves, Step, TableChanges
from quantkit.runtime.sampling.acceptance import accepted_path, describer, proposed_guesses
from quantkit.runtime.sampling.prompt_logprobs import prompt_logprobs, wants_prompt_logprobs
from quantkit.runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class _Travelling:
    """A step on its way through the other stages."""

    plan: StepPlan
    step: Step
    rows: LogitsRows  # but for their hidden states
    returning: ReturningRows


@dataclass(frozen=True)
class InFlight:
    """A step that was launched. Its tokens are sampled at once where this process has the last blocks, else when its
    rows are back from the other stages: `Runner.arrived`."""

    launched: Launched | None
    travelling: _Travelling | None = None

    @property
    def plan(self) -> StepPlan:
        way = self.launched or self.travelling
        assert way is not None
        return way.plan


class Runner:
    """Owns what this process has of the model, and with it the rows of the device's state."""

    def __init__(
        self,
        part: ModelPart,
        sampler: Sampler,
        peers: Peers = Alone(),  # noqa: B008  (has no state)
    ) -> None:
        self.part = part
        self.cache = part.cache
        self.device_rows = part.device_rows
        self.graphs = part.graphs
        self.decoder = peers.coordinated(part.decoder)  # for others: all ranks take part in what it computes
        self.keeps_hidden = False
        self._sampler = sampler
        self._peers = peers
        self._changes = TableChanges(part.device_rows.num_rows, part.device_rows.page_table.shape[1])
        self._table: tuple[list[int], list[int]] = [], []  # its changes for the step that is prepared
        self._maker = InputMaker(part.cache.page_size)
        self._swapped: dict[int, Sequence] = {}  # those with pages in host memory

    @property
    def device(self) -> torch.device:
        return self.part.device

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Captures graphs before the first request asks for them."""
        if self.graphs is not None:
            for size in sizes:
                self.graphs.capture(Key(size, 1))

    def prepare(self, plan: StepPlan) -> None:
        """Pages are moved, and the device knows who has which; then whoever guesses may do so."""
        moves = self._moves(plan)
        if moves:
            self._peers.tell_moves(moves)
            self.part.move(moves)
        self._table = self._changes.of(plan)
        self.device_rows.update_table(*self._table)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Queues one step that was prepared."""
        inputs = self._maker.make(plan)
        step = Step(inputs, *self._table, all_tokens=wants_prompt_logprobs(plan))
        with self._peers.guarded():
            self._peers.tell_step(step)
            with self.part.clock:
                every, rows = self.part.run(inputs)
            returning = self._peers.send_on(every, len(step.wanted))
            if returning is None:
                return InFlight(self._sample(plan, step, rows, every))
            return InFlight(None, _Travelling(plan, step, rows, returning))

    @torch.inference_mode()
    def arrived(self, flight: InFlight) -> Launched:
        """Waits until a step has gone through all stages, and samples its tokens."""
        if flight.launched is not None:
            return flight.launched
        assert flight.travelling is not None
        plan, step = flight.travelling.plan, flight.travelling.step
        with self._peers.guarded():
            hidden = flight.travelling.returning.wait()
            with self.part.clock:
                wanted = hidden[step.inputs.logits_rows] if step.all_tokens else hidden
                rows = replace(flight.travelling.rows, hidden=wanted)
                return self._sample(plan, step, rows, hidden if step.all_tokens else None)

    def _sample(self, plan: StepPlan, step: Step, rows: LogitsRows, every: Tensor | None) -> Launched:
        """The tokens behind the rows of a step. Where it also asks for prompts, ranks are told of each logits."""
        prompts: dict[int, PromptLogprobs] = {}
        if step.all_tokens and every is not None:
            prompts = prompt_logprobs(self.decoder, every, plan, step.inputs.starts)
        sampling = [work for work in plan.scheduled if work.samples]
        if not sampling:
            nothing = self._bring_back(plan, sampling, Samples(rows.owner_rows), None, prompts, rows.hidden)
            return replace(nothing, features=rows.features)
        logits = (self.decoder if step.all_tokens else self.part.decoder).logits(rows.hidden)
        finished = Status.FINISHED
        if [work for work in sampling if work.sequence.status is finished]:  # meanwhile: its row is another's
            alive = [row for row, owner in enumerate(_owners(sampling)) if not owner.finished]
            sampling = [work for work in sampling if not work.sequence.finished]
            logits, rows = logits[alive], _some_rows(rows, alive)
        if not sampling:
            return self._bring_back(plan, sampling, Samples(rows.owner_rows), None, prompts, rows.hidden)
        owners = _owners(sampling)
        drafted = len(owners) > len(sampling)
        shaped = drafted and any(one.guide is not None or one.params.shapes_logits for one in owners)
        guesses = [before for work in sampling for before in work.guesses_before_rows()] if shaped else None
        proposed = proposed_guesses(plan, sampling, rows.ids) if plan.proposals else None
        samples = self._sampler(logits, owners, rows.owner_rows, rows.positions, guesses, proposed, rows.ids)
        self.device_rows.tokens[rows.owner_rows, 0] = samples.tokens
        verified = rows.ids if drafted else None
        launched = self._bring_back(plan, sampling, samples, verified, prompts, rows.hidden)
        return replace(launched, rows=StepRows(rows.ids, rows.positions, samples.tokens), features=rows.features)

    def collect(self, launched: Launched) -> list[Outcome]:
        """Waits for a step. A draft holds as far as it is what was sampled behind the tokens before."""
        if launched.done is not None:
            launched.done.synchronize()
        tokens = launched.samples.tokens.tolist()
        verified = [] if launched.verified is None else launched.verified.tolist()
        if launched.samples.logprobs is None and not verified:
            return [Outcome(work, [Sampled(token)], (), row)
                    for row, (work, token) in enumerate(zip(launched.sampling, tokens, strict=True))]  # fmt: skip
        describe = describer(launched.samples)
        found, row = [], 0
        for work in launched.sampling:
            path = accepted_path(work, row, tokens, verified, launched.plan.coins)
            rows = [row, *(row + 1 + node for node in path)]
            wanted = work.sequence.params.logprobs
            sampled = [Sampled(tokens[at], *describe(at, wanted)) for at in rows]
            found.append(Outcome(work, sampled, tuple(path), row))
            row += len(work.draft) + 1
        return found

    def forget_step(self) -> None:
        """After a step that failed: what of the page table had reached the device is not known, and pages in host
        memory are kept of those only who will ask for them."""
        self._changes.forget()
        self.part.host_pages.keep(self._swapped)

    def keep_paths(self, outcomes: list[Outcome]) -> None:
        """Keys and values of guesses that were right, from where a tree had them to where the next step looks."""
        sources: list[int] = []
        targets: list[int] = []
        size = self.cache.page_size
        for outcome in outcomes:
            work, pages = outcome.scheduled, outcome.scheduled.sequence.pages
            first = work.start + work.num_tokens - len(work.draft)
            for ahead, node in enumerate(outcome.path):
                if node != ahead and pages:
                    sources.append(pages[(first + node) // size] * size + (first + node) % size)
                    targets.append(pages[(first + ahead) // size] * size + (first + ahead) % size)
        if sources:
            self._peers.tell_kept(sources, targets)
            both = self.device_rows.to_device(sources + targets)
            keep_path(self.cache.planes, *both.chunk(2))

    def _moves(self, plan: StepPlan) -> PageMoves:
        for sequence, _ in plan.swap_in:
            del self._swapped[sequence.id]
        dropped = [number for number, sequence in self._swapped.items() if sequence.swapped is None]
        for number in dropped:
            del self._swapped[number]
        self._swapped |= {sequence.id: sequence for sequence, _ in plan.swap_out}
        out, back = ([(one.id, pages) for one, pages in moved] for moved in (plan.swap_out, plan.swap_in))
        return PageMoves(dropped, out, back, plan.copies)

    def _bring_back(
        self,
        plan: StepPlan,
        sampling: list[Scheduled],
        samples: Samples,
        verified: Tensor | None,
        prompts: dict[int, PromptLogprobs],
        hidden: Tensor,
    ) -> Launched:
        kept = hidden.clone() if self.keeps_hidden else None
        if self.device.type == "cpu":
            return Launched(plan, sampling, samples, verified, prompts, None, kept)
        parts = (samples.tokens, samples.logprobs, samples.top, samples.top_logprobs, verified)
        *host, ids = (None if part is None else to_host(part) for part in parts)
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        if done is not None:
            done.record()
        return Launched(plan, sampling, Samples(*host), ids, prompts, done, kept)  # type: ignore[arg-type]


def _owners(sampling: list[Scheduled]) -> list[Sequence]:
    """Of every row behind which a token is sampled."""
    if [work for work in sampling if work.draft]:
        return [work.sequence for work in sampling for _ in range(len(work.draft) + 1)]
    return [work.sequence for work in sampling]


def _some_rows(rows: LogitsRows, at: list[int]) -> LogitsRows:
    return LogitsRows(rows.hidden[at], rows.ids[at], rows.owner_rows[at], rows.positions[at])
