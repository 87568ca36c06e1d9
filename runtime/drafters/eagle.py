"""An EAGLE head guesses: one decoder layer that goes on from the model's own hidden states.

Behind every step it reads what the step left of those who speculate, prompts and answers, into a cache of its own with
the pages of the model's; then it guesses for the next step. All of that waits on the device for the step, while the
host does not wait: it looks at the tokens meanwhile (`eagle_loop.py`).

Hidden states are not kept, so what nobody read stays unread: answers while guessing did not pay, what a sequence has
in pages that come back from host memory, and pages that were computed for somebody who did not speculate. In the last
slot of a page that sequences share stands the follower of whoever filled it. All of this costs guesses, never answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import Scheduled, StepPlan, guess_in_row
from quantkit.runtime.core.step_result import Launched, Outcome
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.step_inputs import InputMaker, PageMoves
from quantkit.runtime.drafters.draft_loop import Behind
from quantkit.runtime.drafters.draft_model import draws, looks_at_guesses
from quantkit.runtime.drafters.eagle_loop import EagleLoop, Wanted
from quantkit.runtime.sampling.sampler import settings_of


@dataclass(frozen=True)
class _Feature:
    """The newest one of a sequence, on the device, and guesses that were queued from there."""

    row: int
    stay: int  # how often the sequence had been preempted
    guesses: int = 0
    logits: Tensor | None = None  # [guesses, vocab] that they were drawn from, where they were
    length: int = 0  # of the sequence, when the host knows

    def is_of(self, sequence: Sequence) -> bool:
        return (self.row, self.stay, self.length) == (sequence.row, sequence.num_preemptions, len(sequence.tokens))


class EagleDrafter:
    def __init__(self, part: ModelPart, loop: EagleLoop) -> None:
        self._part = part
        self._maker = InputMaker(part.cache.page_size)
        self.loop = loop
        self._wanted: dict[int, int] = {}  # sequence -> guesses that the policy asked for
        self._coming: dict[int, _Feature] = {}  # of sequences in steps on their way
        self._known: dict[int, _Feature] = {}

    def capture(self, sequences: int, guesses: int) -> None:
        """The graphs that guesses for so many sequences need."""
        if self.loop.sizes and sequences <= self.loop.sizes[-1]:
            self.loop.prepare_reading(sequences, 0)
            for drawn in (False, True):
                self.loop.prepare(sequences, guesses, drawn)

    def unread(self, sequence: Sequence) -> int:
        """Nothing is read later: features that were not taken when a token was computed are gone."""
        return 0

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Room for so many; `complete` fills what nobody guessed yet."""
        feature = self._known.get(sequence.id)
        if feature is None or not feature.is_of(sequence):
            return []
        self._wanted[sequence.id] = most
        return [guess_in_row(number) for number in range(min(most, feature.guesses or most))]

    @torch.inference_mode()
    def complete(self, plan: StepPlan) -> StepPlan:
        self._part.move(PageMoves(copies=plan.copies))
        drafted = {work.sequence.id: work for work in plan.scheduled if work.draft}
        features = {number: self._known.pop(number) for number in drafted}
        proposals = {number: one.logits for number, one in features.items() if one.logits is not None}
        late = [work for number, work in drafted.items() if not features[number].guesses]
        if not late:
            return plan.with_guesses({}, proposals)
        sequences = [work.sequence for work in late]
        proposals |= self._guess(sequences, [len(work.draft) for work in late])
        drafts: dict[int, tuple[int, ...]] = {}
        if any(looks_at_guesses(one) for one in sequences):
            found = self.loop.guesses([one.row for one in sequences], max(len(work.draft) for work in late))
            for work, tokens in zip(late, found.tolist(), strict=True):
                drafts[work.sequence.id] = tuple(tokens[: len(work.draft)])
        return plan.with_guesses(drafts, proposals)

    @torch.inference_mode()
    def follow(self, launched: Launched) -> None:
        """Reads what the step leaves, then guesses for those whose guesses it verifies, but for those whose next
        guesses the host must know."""
        read = _Step.of(launched, lambda work: work.sequence.speculates)
        if read.answers:
            self._read_answers(launched, read)
        if read.chunks:
            self._read_chunks(launched, read)
        for work in (*read.answers, *read.chunks):
            if work.samples:
                self._coming[work.sequence.id] = _Feature(work.sequence.row, work.sequence.num_preemptions)
        ahead = [work.sequence for work in read.answers if work.draft and not looks_at_guesses(work.sequence)]
        if not ahead:
            return
        lengths = [self._wanted[one.id] for one in ahead]
        logits = self._guess(ahead, lengths)
        for one, length in zip(ahead, lengths, strict=True):
            self._coming[one.id] = replace(self._coming[one.id], guesses=length, logits=logits.get(one.id))

    def observe(self, launched: Launched, outcomes: list[Outcome], ended: Collection[int]) -> None:
        for outcome in outcomes:
            sequence = outcome.scheduled.sequence
            feature = self._coming.pop(sequence.id, None)
            if feature is not None:
                self._known[sequence.id] = replace(feature, length=len(sequence.tokens) + len(outcome.tokens))
        for kept in (self._wanted, self._coming, self._known):
            for number in ended:
                kept.pop(number, None)

    def _read_answers(self, launched: Launched, read: _Step) -> None:
        assert launched.rows is not None
        assert launched.features is not None
        behind = Behind([read.logits_rows[id(work)] for work in read.answers],
                        [len(work.draft) for work in read.answers])  # fmt: skip
        states = launched.features
        if not launched.plan.answers_only:
            states = states[self._part.device_rows.to_device(read.sampled_tokens)]
        rows = [work.sequence.row for work in read.answers]
        self.loop.read_answers(launched.rows, states, behind, launched.plan.coins, rows)

    def _read_chunks(self, launched: Launched, read: _Step) -> None:
        assert launched.features is not None
        inputs = self._maker.make(StepPlan(read.chunks))
        inputs.ids = [token for work in read.chunks for token in _following(work)]
        rows = [token for work in read.chunks for token in read.tokens[id(work)]]
        states = launched.features[self._part.device_rows.to_device(rows)]
        sampled = [read.logits_rows[id(work)] for work in read.chunks if work.samples]
        found = self._part.device_rows.to_device(sampled)
        tokens = found if launched.rows is None else launched.rows.sampled[found]
        self.loop.read_chunks(inputs, states, tokens)

    def _guess(self, sequences: list[Sequence], lengths: list[int]) -> dict[int, Tensor]:
        """The logits of those that draw their guesses."""
        greedy = all(one.params.greedy for one in sequences)
        seeds = [~one.seed if draws(one) else one.seed for one in sequences]
        wanted = Wanted(
            rows=[one.row for one in sequences],
            lengths=lengths,
            rooms=[len(one.pages) * self._part.cache.page_size for one in sequences],
            settings=None if greedy else settings_of(sequences, seeds, self._part.device),
        )
        logits = self.loop.guess(wanted)
        if logits is None:
            return {}
        return {one.id: logits[:, number] for number, one in enumerate(sequences) if draws(one)}


@dataclass(frozen=True)
class _Step:
    """Who is read behind a step, and where its tokens are. Works go by their `id`."""

    answers: list[Scheduled]  # the last known token, and guesses
    chunks: list[Scheduled]  # of prompts, or of what is computed anew
    tokens: dict[int, range]  # of works, among those of the step
    logits_rows: dict[int, int]  # the first of a work, among the rows behind which a token is sampled
    sampled_tokens: list[int]  # of all these rows, among the tokens of the step

    @classmethod
    def of(cls, launched: Launched, wanted: Callable[[Scheduled], bool]) -> _Step:
        found = cls([], [], {}, {}, [])
        start = 0
        for work in launched.plan.scheduled:
            found.tokens[id(work)] = range(start, start + work.num_tokens)
            start += work.num_tokens
            if wanted(work):
                is_answer = work.samples and work.num_tokens == 1 + len(work.draft)
                (found.answers if is_answer else found.chunks).append(work)
        for work in launched.sampling:
            found.logits_rows[id(work)] = len(found.sampled_tokens)
            found.sampled_tokens.extend(found.tokens[id(work)][-1 - len(work.draft) :])
        return found


def _following(work: Scheduled) -> list[int]:
    """The token behind each of a chunk's; one that was just sampled is not known yet."""
    tokens = work.sequence.tokens[work.start + 1 : work.start + work.num_tokens + 1]
    return tokens + [0] * (work.num_tokens - len(tokens))
