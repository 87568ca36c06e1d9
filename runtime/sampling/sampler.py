"""From logits to tokens, on the device: penalties, biases, bans, watermarks, the draw, and log-probabilities
where asked for.

What a step needs from the host is made anew only when the set of sequences changes. Penalties keep, for every row of
the device's state, how often each token was answered and whether it stood in the prompt; the tables exist from the
first request on that asks for a penalty.

A sequence that speculates has a row for its last token and one for each guess behind it. What penalties and guides say
of a row depends on the guesses in front of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.runtime.core.sequence import Guide, Sequence
from quantkit.runtime.core.step_result import Samples, joined
from quantkit.runtime.model.ops import Ops
from quantkit.runtime.sampling.rejection import Proposed, verify
from quantkit.runtime.sampling.watermark import GreenLists


@dataclass(frozen=True)
class Settings:
    """Parameters of the rows of a batch, on the device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor

    def of(self, rows: slice) -> Settings:
        return Settings(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class _Asked:
    """What the sequences of a batch ask for, found once for as long as the same ones answer."""

    settings: Settings | None  # None: all are greedy
    most_logprobs: int | None
    shaped: bool  # somebody's logits change before a token is chosen
    penalized: bool

    @property
    def only_largest(self) -> bool:
        return self.settings is None and self.most_logprobs is None and not self.shaped


Guesses = Ordered[tuple[int, ...]]  # in front of each row
SAMPLED_ROWS = 512  # at a time: what is made of logits is in float32
SHAPED_BYTES = 12  # of each logit of these rows: shaped, and log-probabilities
TABLE_BYTES = 5  # of each token and device row, for penalties
_PENALIZED_ROWS = 128  # at a time: they take more


class Sampler:
    def __init__(self, ops: Ops, vocab: int, num_rows: int, device: torch.device, seed: int = 0) -> None:
        """`seed` is for what no request's own seed decides."""
        self._ops = ops
        self._vocab = vocab
        self._num_rows = num_rows
        self._device = device
        self._asked_by: tuple[int, ...] = ()
        self._asked = _Asked(None, None, shaped=False, penalized=False)
        self._answered: Tensor | None = None  # int32 [device rows, vocab]
        self._prompted: Tensor | None = None  # bool [device rows, vocab]
        self._owners: dict[int, tuple[int, int]] = {}  # device row -> sequence that the tables count, and its stay
        self._counted: dict[int, int] = {}  # device row -> tokens of the answer that the tables count
        self._random = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        self._green_lists = GreenLists(vocab, device)

    @torch.inference_mode()
    def __call__(
        self,
        logits: Tensor,
        sequences: Ordered[Sequence],
        owner_rows: Tensor,
        positions: Tensor,
        guesses: Guesses | None = None,
        proposed: Proposed | None = None,
        before: Tensor | None = None,
    ) -> Samples:
        """A token for each row of logits [rows, vocab]; `positions` [rows] are those of the tokens in front,
        `owner_rows` [rows] the device rows of the sequences.

        `guesses` stand between what is known of a sequence and each row; `proposed` are the ones that were drawn from
        a distribution, to be accepted by what they had been worth there. `before` [rows] are the tokens in front of
        each row, for watermarks.
        """
        asked = self._look_at(sequences)
        if len(sequences) <= SAMPLED_ROWS or asked.only_largest:
            return self._sample(logits, sequences, owner_rows, positions, guesses, proposed, before, asked)
        found = []
        for start, stop in _parts(sequences):
            rows = slice(start, stop)
            found.append(
                self._sample(
                    logits[rows],
                    sequences[rows],
                    owner_rows[rows],
                    positions[rows],
                    None if guesses is None else guesses[rows],
                    None if proposed is None else proposed.within(start, stop),
                    None if before is None else before[rows],
                    asked if asked.settings is None else replace(asked, settings=asked.settings.of(rows)),
                )
            )
        return joined(found)

    def _sample(
        self,
        raw: Tensor,
        sequences: Ordered[Sequence],
        owner_rows: Tensor,
        positions: Tensor,
        guesses: Guesses | None,
        proposed: Proposed | None,
        before: Tensor | None,
        asked: _Asked,
    ) -> Samples:
        """`asked` may be that of a larger batch, but for its settings."""
        logits, settings, most = raw, asked.settings, asked.most_logprobs
        if asked.shaped:
            logits = self._shaped(logits.float().clone(), sequences, guesses or [()] * len(sequences), before)
        if settings is None:
            tokens, _ = self._ops.greedy(logits)
        else:
            kept = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
            tokens, _ = self._ops.sample(logits, *kept, settings.seed, positions)
            if proposed is not None and proposed.logits_rows:
                at = torch.tensor(proposed.logits_rows).to(self._device, non_blocking=True)
                tokens[at] = verify(logits, proposed, *kept, self._random)
        if asked.penalized:
            self._count(sequences, owner_rows, tokens)
        return Samples(tokens) if most is None else _with_logprobs(raw, tokens, most)

    def _look_at(self, sequences: Ordered[Sequence]) -> _Asked:
        key = tuple([sequence.id for sequence in sequences])
        if key != self._asked_by:
            params = [sequence.params for sequence in sequences]
            greedy = all(one.greedy for one in params)
            self._asked = _Asked(
                settings=None if greedy else settings_of(sequences, [one.seed for one in sequences], self._device),
                most_logprobs=max((one.logprobs for one in params if one.logprobs is not None), default=None),
                shaped=any(one.params.shapes_logits or one.guide is not None for one in sequences),
                penalized=any(one.penalized for one in params),
            )
            self._asked_by = key
        return self._asked

    def _shaped(self, logits: Tensor, sequences: Ordered[Sequence], guesses: Guesses, before: Tensor | None) -> Tensor:
        """Penalties, biases, watermarks, and no end before the least number of tokens; changes logits [rows, vocab] in
        place."""
        penalized = [row for row, sequence in enumerate(sequences) if sequence.params.penalized]
        for first in range(0, len(penalized), _PENALIZED_ROWS):
            self._penalize(logits, penalized[first : first + _PENALIZED_ROWS], sequences, guesses)
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, sequence in enumerate(sequences):
            changes = dict(sequence.params.logit_bias)
            length = sequence.length + len(guesses[row]) - len(sequence.prompt)  # its new token is counted
            early = length <= sequence.params.min_tokens
            if early and sequence.guide is None:  # a guide knows when it ends
                changes |= dict.fromkeys(sequence.end_tokens, float("-inf"))
            rows += [row] * len(changes)
            tokens += changes.keys()
            values += changes.values()
        if rows:
            at = torch.tensor([rows, tokens]).to(self._device, non_blocking=True)
            logits[at[0], at[1]] += torch.tensor(values).to(self._device, non_blocking=True)
        self._green_lists.mark(logits, sequences, before)
        for row, sequence in enumerate(sequences):
            if sequence.guide is not None:
                self._restrict(logits[row], sequence.guide, guesses[row])
        return logits

    def _restrict(self, logits: Tensor, guide: Guide, guesses: tuple[int, ...]) -> None:
        """Bans what a guide does not allow behind these guesses.

        One that is broken allows all: it ends its sequence with the next token. So does one that does not allow the
        guesses: what is sampled behind them is not looked at.
        """
        try:
            allowed = guide.mask_behind(guesses) if guesses else guide.mask()
        except QuantkitError:
            return
        logits.masked_fill_(~allowed.to(self._device, non_blocking=True), float("-inf"))

    def _penalize(self, logits: Tensor, rows: list[int], owners: Ordered[Sequence], guesses: Guesses) -> None:
        sequences = [owners[row] for row in rows]
        answered, prompted = self._tables(sequences)
        owner_rows = torch.tensor([sequence.row for sequence in sequences], device=self._device)
        at = torch.tensor(rows, device=self._device)
        params = [sequence.params for sequence in sequences]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=self._device)[:, None]

        counts = answered[owner_rows]
        ahead = [(number, token) for number, row in enumerate(rows) for token in guesses[row]]
        if ahead:
            number, token = torch.tensor(ahead, device=self._device).unbind(1)
            counts.index_put_((number, token), counts.new_ones(1), accumulate=True)
        changed = logits[at]
        repetition = column([p.repetition_penalty for p in params])
        seen = (counts > 0) | prompted[owner_rows]
        weaker = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = torch.where(seen, weaker, changed)
        changed -= counts * column([p.frequency_penalty for p in params])
        changed -= (counts > 0) * column([p.presence_penalty for p in params])
        logits[at] = changed

    def _tables(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        if self._answered is None or self._prompted is None:
            shape = (self._num_rows, self._vocab)
            self._answered = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompted = torch.zeros(shape, dtype=torch.bool, device=self._device)
        for sequence in sequences:
            stay = (sequence.id, sequence.num_preemptions)
            if self._owners.get(sequence.row) != stay:  # new in this row: all its tokens are known
                self._owners[sequence.row] = stay
                self._counted[sequence.row] = 0
                self._answered[sequence.row] = 0
                self._prompted[sequence.row] = False
                self._prompted[sequence.row, torch.tensor(sequence.prompt, device=self._device)] = True
            new = sequence.tokens[len(sequence.prompt) + self._counted[sequence.row] :]
            if new:
                answer = torch.tensor(new, dtype=torch.int64, device=self._device)
                self._answered[sequence.row].scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
                self._counted[sequence.row] += len(new)
        return self._answered, self._prompted

    def _count(self, sequences: Ordered[Sequence], owner_rows: Tensor, tokens: Tensor) -> None:
        """Tokens that the next step must count, though the host may not know them then.

        Of a sequence with guesses the host must know which were right before its next step; they are counted there.
        """
        penalized = [row for row, one in enumerate(sequences) if one.params.penalized]
        if penalized and self._answered is not None:
            times = Counter(one.id for one in sequences)
            rows = [row for row in penalized if times[sequences[row].id] == 1]
            at = torch.tensor(rows, dtype=torch.int64, device=self._device)
            self._answered[owner_rows[at], tokens[at]] += 1
            for row in rows:
                self._counted[sequences[row].row] += 1


def _parts(sequences: Ordered[Sequence]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are sampled together: few, and all of a sequence."""
    start = 0
    while start < len(sequences):
        stop = min(start + SAMPLED_ROWS, len(sequences))
        while stop < len(sequences) and sequences[stop] is sequences[stop - 1]:
            stop += 1
        yield start, stop
        start = stop


def settings_of(sequences: Ordered[Sequence], seeds: list[int], device: torch.device) -> Settings:
    params = [sequence.params for sequence in sequences]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return Settings(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column(seeds, torch.int64),
    )


def _with_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Samples:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None].clamp(min=0))[:, 0]  # NO_TOKEN has none
    values, top = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    return Samples(tokens, chosen, top, values)
