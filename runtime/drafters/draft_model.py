"""A small model with the same tokens guesses what the large one will say.

Its cache has as many pages as the target's, with the same numbers: a sequence's page table serves both, and pages that
sequences share are shared in both. Before a step, the draft reads what it does not know yet, then guesses token by
token (`draft_loop.py`). The guesses stay on the device, where the target's step finds them.

While nobody guesses, the draft reads nothing, so it must know which pages it has filled with what they hold now: a
sequence that begins with pages of another reads those that the draft missed.

Where steps overlap, the guesses for the next step are queued behind the step that is on its way: the device knows what
it accepted, and the host has pages ready for whatever that is. While the draft guesses, the host looks at the tokens
and prepares the next step, so nobody waits.

A request with a seed, or a greedy one, is guessed for with the target's own random numbers: where both agree about the
probabilities they choose the same token, and the answer is that of plain decoding. Other requests are guessed for with
numbers of their own, and guesses are accepted by what they are worth in both distributions (`sampling/rejection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from quantkit.arch import Config
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import Scheduled, StepPlan, guess_in_row
from quantkit.runtime.core.step_result import Launched, Outcome
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.prompt_graphs import MOST_TOKENS
from quantkit.runtime.device.step_inputs import InputMaker, PageMoves
from quantkit.runtime.drafters.draft_loop import Behind, DraftLoop, LoopInputs
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.layers import Weights
from quantkit.runtime.sampling.sampler import settings_of


@dataclass(frozen=True)
class DraftModel:
    """A draft that is not loaded yet."""

    raw: Config
    config: ModelConfig
    load: Callable[[Weights, str], Weights]  # given the target's, and the `kv_dtype` of both
    size: int  # bytes of its weights
    unknown: tuple[int, ...] = ()  # tokens of the target that it does not have (`shared_tokens.py`)


@dataclass(frozen=True)
class _Early:
    """Guesses that were queued behind a step."""

    count: int
    stay: int  # how often the sequence had been preempted
    logits: Tensor | None  # [guesses, vocab] that they were drawn from, where they were
    known: int = 0  # tokens in front of them, when the host knows


class ModelDrafter:
    def __init__(self, part: ModelPart, loop: DraftLoop) -> None:
        self._wanted: dict[int, int] = {}  # sequence -> guesses that the policy asked for
        self._queued: dict[int, _Early] = {}  # sequence -> guesses behind the step that is on its way
        self._ready: dict[int, _Early] = {}  # the same when that step's results are known
        self._part = part
        self._maker = InputMaker(part.cache.page_size)
        self.loop = loop
        self._read: dict[int, tuple[int, int]] = {}  # sequence -> tokens in the draft's cache, and which stay that was
        self._filled: set[int] = set()  # full pages, whose tokens the draft has read

    def capture(self, sequences: int, guesses: int) -> None:
        """The graphs that guesses for so many sequences need."""
        prompts = self._part.prompt_graphs
        if prompts is not None:
            for key in prompts.keys:
                prompts.capture(key)
        if self.loop.sizes and sequences <= self.loop.sizes[-1]:
            for drawn in (False, True):
                self.loop.prepare(sequences, guesses, drawn)

    def unread(self, sequence: Sequence) -> int:
        """Tokens to be read before a first guess; the loop itself reads the last two."""
        return max(0, len(sequence.tokens) - 2 - self._num_read(sequence))

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Room for so many; `complete` fills it when the sequence has its pages."""
        if not sequence.num_computed:
            return []
        self._wanted[sequence.id] = most
        ready = self._ready.get(sequence.id)
        if ready is not None and _fits(ready, sequence, len(sequence.tokens)):
            most = min(most, ready.count)
        return [guess_in_row(number) for number in range(most)]

    @torch.inference_mode()
    def complete(self, plan: StepPlan) -> StepPlan:
        """Reads what sequences that speculate compute in this step, and guesses for those that have a draft and no
        guesses yet."""
        self._part.move(PageMoves(copies=plan.copies))
        self._forget_pages(plan)
        chunks = [self._unread(work) for work in plan.scheduled if work.sequence.speculates]
        for reading in _readings([chunk for chunk in chunks if chunk is not None]):
            self._part.run(self._maker.make(reading))
        drafted = [work for work in plan.scheduled if work.draft]
        late = [work for work in drafted if not self._has_guesses(work)]
        drafts: dict[int, tuple[int, ...]] = {}
        proposals: dict[int, Tensor] = {}
        for work in drafted:
            found = self._ready.get(work.sequence.id)
            if found is not None and found.logits is not None:  # another loop would use the same memory
                proposals[work.sequence.id] = found.logits.clone() if late else found.logits
        if late:
            drafts, drawn = self._guess_ahead(late)
            proposals |= drawn
        self._ready.clear()
        return plan.with_guesses(drafts, proposals)

    @torch.inference_mode()
    def follow(self, launched: Launched) -> None:
        """For those whose guesses are being verified, but for those whose next guesses the host must know."""
        if launched.rows is None:  # a step of prompts alone
            return
        scheduled, behind = [], Behind([], [])
        row = 0
        for work in launched.sampling:
            if work.draft and not looks_at_guesses(work.sequence):
                scheduled.append(work)
                behind.logits_rows.append(row)
                behind.guesses.append(len(work.draft))
            row += 1 + len(work.draft)
        if not scheduled:
            return
        sequences = [work.sequence for work in scheduled]
        inputs = replace(
            self._inputs(sequences, [self._wanted[one.id] for one in sequences]),
            ids=[(0, 0)] * len(scheduled),
            positions=[1] * len(scheduled),
        )
        logits = self.loop.run_behind(launched.rows, behind, launched.plan.coins, inputs)
        for number, one in enumerate(sequences):
            drawn = logits[:, number] if logits is not None and draws(one) else None
            self._queued[one.id] = _Early(inputs.lengths[number], one.num_preemptions, drawn)

    def observe(self, launched: Launched, outcomes: list[Outcome], ended: Collection[int]) -> None:
        """Wrong guesses are forgotten, and what the target chose instead was not read yet."""
        for outcome in outcomes:
            work, sequence = outcome.scheduled, outcome.scheduled.sequence
            known = work.start + work.num_tokens - len(work.draft) + outcome.num_accepted
            read, stay = self._read.get(sequence.id, (0, 0))
            self._read[sequence.id] = min(read, known), stay
            self._note_pages(sequence, read - work.num_tokens, min(read, known))
            queued = self._queued.pop(sequence.id, None)
            if queued is not None:
                self._ready[sequence.id] = replace(queued, known=known + 1)
        for kept in (self._read, self._wanted, self._queued, self._ready):
            for number in ended:
                kept.pop(number, None)

    def _has_guesses(self, work: Scheduled) -> bool:
        sequence, known = work.sequence, work.start + work.num_tokens - len(work.draft)
        ready = self._ready.get(sequence.id)
        if ready is None or not _fits(ready, sequence, known) or ready.count < len(work.draft):
            self._ready.pop(sequence.id, None)
            return False
        self._read[sequence.id] = known - 1 + len(work.draft), sequence.num_preemptions
        return True

    def _unread(self, work: Scheduled) -> tuple[Sequence, int, int] | None:
        """Positions that must be read before anything is guessed; the loop itself reads the last two known tokens.

        An answer for which nothing is guessed now is read when something is, and often never: it may be at its end.
        """
        sequence, known = work.sequence, work.start + work.num_tokens - len(work.draft)
        start = min(self._num_read(sequence), work.start)
        if work.num_tokens == 1 and work.samples:
            self._read[sequence.id] = start, sequence.num_preemptions
            return None
        end = known - 2 if work.draft else known
        self._read[sequence.id] = known, sequence.num_preemptions
        self._note_pages(sequence, start, end)
        return (sequence, start, end) if start < end else None

    def _num_read(self, sequence: Sequence) -> int:
        """Tokens at its beginning that the draft knows; where it is new, or came back, those of pages it has filled."""
        read, stay = self._read.get(sequence.id, (0, -1))
        if stay == sequence.num_preemptions:
            return read
        held = takewhile(self._filled.__contains__, sequence.pages)
        return sum(1 for _ in held) * self._part.cache.page_size

    def _note_pages(self, sequence: Sequence, start: int, end: int) -> None:
        """The draft has read the tokens from `start` to `end`, and all before them."""
        size = self._part.cache.page_size
        self._filled.update(sequence.pages[max(0, start) // size : end // size])

    def _forget_pages(self, plan: StepPlan) -> None:
        """Those that hold other tokens now: the target begins them in this step, copies them, or had them away."""
        size = self._part.cache.page_size
        for work in plan.scheduled:
            if work.num_tokens > 1 or work.start % size == 0:
                first, last = -(-work.start // size), -(-(work.start + work.num_tokens) // size)
                self._filled.difference_update(work.sequence.pages[first:last])
        for _, pages in plan.swap_in:
            self._filled.difference_update(pages)
        self._filled.difference_update(copied for _, copied in plan.copies)

    def _guess_ahead(self, scheduled: list[Scheduled]) -> tuple[dict[int, tuple[int, ...]], dict[int, Tensor]]:
        """What `StepPlan.with_guesses` takes."""
        sequences = [work.sequence for work in scheduled]
        lasts = [work.start + work.num_tokens - len(work.draft) - 1 for work in scheduled]
        inputs = replace(
            self._inputs(sequences, [len(work.draft) for work in scheduled]),
            ids=[tuple(one.tokens[last - 1 : last + 1]) for one, last in zip(sequences, lasts, strict=True)],
            positions=lasts,
        )
        guesses, logits = self.loop.run(inputs)
        drawn = {}
        for number, work in enumerate(scheduled):
            self._read[work.sequence.id] = lasts[number] + len(work.draft), work.sequence.num_preemptions
            if draws(work.sequence):
                assert logits is not None
                drawn[work.sequence.id] = logits[:, number]
        if not any(looks_at_guesses(one) for one in sequences):
            return {}, drawn
        found = zip(scheduled, guesses.tolist(), strict=True)
        return {work.sequence.id: tuple(tokens[: len(work.draft)]) for work, tokens in found}, drawn

    def _inputs(self, sequences: list[Sequence], lengths: list[int]) -> LoopInputs:
        """All but what the loop begins with."""
        seeds = [~one.seed if draws(one) else one.seed for one in sequences]
        greedy = all(one.params.greedy for one in sequences)
        return LoopInputs(
            ids=[],
            positions=[],
            rows=[one.row for one in sequences],
            lengths=lengths,
            rooms=[len(one.pages) * self._part.cache.page_size for one in sequences],
            settings=None if greedy else settings_of(sequences, seeds, self._part.device),
        )


def _readings(chunks: list[tuple[Sequence, int, int]]) -> Iterator[StepPlan]:
    """Steps that read these positions, none larger than the largest graph of a prompt."""
    scheduled: list[Scheduled] = []
    room = MOST_TOKENS
    for sequence, start, end in chunks:
        while start < end:
            count = min(end - start, room)
            scheduled.append(Scheduled(sequence, start, count, samples=False))
            start, room = start + count, room - count
            if room == 0:
                yield StepPlan(scheduled)
                scheduled, room = [], MOST_TOKENS
    if scheduled:
        yield StepPlan(scheduled)


def _fits(early: _Early, sequence: Sequence, known: int) -> bool:
    """Whether guesses were made behind just these tokens."""
    return early.known == known and early.stay == sequence.num_preemptions


def draws(sequence: Sequence) -> bool:
    """Whether its guesses are drawn with numbers of their own (`sampling/rejection.py`)."""
    return sequence.params.seed is None and not sequence.params.greedy


def looks_at_guesses(sequence: Sequence) -> bool:
    """Whether the host must know guesses before they are verified."""
    return sequence.guide is not None or sequence.params.shapes_logits
