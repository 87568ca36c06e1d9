"""A small model with the same tokens guesses what the large one will say.

Its cache has as many pages as the target's, with the same numbers: a sequence's page table serves both, and pages that
sequences share are shared in both. Before a step, the draft reads what the target is about to compute, then guesses
token by token. It samples as the target will, with the random numbers of each position, so that both choose the same
token where they agree about its probability. A page that the draft never filled (after a swap, for one) costs guesses,
never answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import Config
from quantkit.runtime.layers import Weights
from quantkit.runtime.model import Batch, Decoder, KvCache
from quantkit.runtime.model_config import ModelConfig
from quantkit.runtime.runner import Outcome
from quantkit.runtime.sampler import Sampler
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.step_plan import Share, StepPlan

_PLACEHOLDER = 0  # in a draft whose tokens are not guessed yet


@dataclass(frozen=True)
class DraftModel:
    """A draft that is not loaded yet."""

    raw: Config
    config: ModelConfig
    load: Callable[[], Weights]
    size: int  # bytes of its weights


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one sequence that the draft reads now, from a position on."""

    sequence: Sequence
    start: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ModelDrafter:
    def __init__(self, decoder: Decoder, cache: KvCache, sampler: Sampler) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._read: dict[int, tuple[int, int]] = {}  # sequence -> tokens in the draft's cache, and which stay that was

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """Room for so many; `complete` fills it when the sequence has its pages."""
        return [_PLACEHOLDER] * most

    @torch.inference_mode()
    def complete(self, plan: StepPlan) -> None:
        """Reads what sequences that speculate compute in this step, and guesses for those that have a draft."""
        for source, target in plan.copies:
            self._cache.pages[:, :, target] = self._cache.pages[:, :, source]
        shares = [(place, share) for place, share in enumerate(plan.shares) if share.sequence.speculates]
        if not shares:
            return
        chunks = [self._chunk(share) for _, share in shares]
        hidden = self._decoder.hidden_states(self._batch(chunks), self._cache)
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks], device=hidden.device).cumsum(0) - 1
        drafted = [row for row, (_, share) in enumerate(shares) if share.draft]
        for chunk in chunks:
            self._read[chunk.sequence.id] = chunk.end, chunk.sequence.preempted
        if drafted:
            self._guess_ahead(plan, [shares[row] for row in drafted], hidden[ends[drafted]])

    def see(self, outcome: Outcome) -> None:
        """Wrong guesses are forgotten, and what the target chose instead was not read yet."""
        share = outcome.share
        known = share.start + share.count - len(share.draft) + outcome.accepted
        read, stay = self._read.get(share.sequence.id, (0, 0))
        self._read[share.sequence.id] = min(read, known), stay

    def forget(self, sequence: Sequence) -> None:
        self._read.pop(sequence.id, None)

    def _chunk(self, share: Share) -> _Chunk:
        sequence, end = share.sequence, share.start + share.count - len(share.draft)
        read, stay = self._read.get(sequence.id, (share.start, sequence.preempted))
        if stay != sequence.preempted or read >= end:  # it was preempted: its pages are others now
            read = share.start
        return _Chunk(sequence, read, sequence.tokens[read:end])

    def _guess_ahead(self, plan: StepPlan, shares: list[tuple[int, Share]], hidden: Tensor) -> None:
        """Longest drafts first, so that those who still guess are always the first rows."""
        order = sorted(range(len(shares)), key=lambda row: -len(shares[row][1].draft))
        shares = [shares[row] for row in order]
        hidden = hidden[torch.tensor(order, device=hidden.device)]
        firsts = [share.start + share.count - len(share.draft) for _, share in shares]  # position of the first guess
        columns: list[Tensor] = []
        for ahead in range(len(shares[0][1].draft)):
            active = sum(len(share.draft) > ahead for _, share in shares)
            sequences = [share.sequence for _, share in shares[:active]]
            positions = [first + ahead - 1 for first in firsts[:active]]
            if ahead:
                batch = self._one_each(sequences, positions, columns[-1][:active])
                hidden = self._decoder.hidden_states(batch, self._cache)
            columns.append(self._sample(hidden[:active], sequences, positions))
        found = [column.tolist() for column in columns]
        for row, (place, share) in enumerate(shares):
            draft = tuple(column[row] for column in found[: len(share.draft)])
            plan.shares[place] = replace(share, draft=draft)
            self._read[share.sequence.id] = firsts[row] + len(draft) - 1, share.sequence.preempted

    def _sample(self, hidden: Tensor, sequences: list[Sequence], positions: list[int]) -> Tensor:
        at = torch.tensor(positions, device=hidden.device)
        return self._sampler(self._decoder.logits(hidden), sequences, torch.zeros_like(at), at).tokens

    def _one_each(self, sequences: list[Sequence], positions: list[int], ids: Tensor) -> Batch:
        return self._rows(sequences, [[position] for position in positions], ids)

    def _batch(self, chunks: list[_Chunk]) -> Batch:
        ids = [token for chunk in chunks for token in chunk.tokens]
        ranges = [list(range(chunk.start, chunk.end)) for chunk in chunks]
        device = self._cache.pages.device
        return self._rows([chunk.sequence for chunk in chunks], ranges, torch.tensor(ids, device=device))

    def _rows(self, sequences: list[Sequence], positions: list[list[int]], ids: Tensor) -> Batch:
        size, device = self._cache.page_size, ids.device
        slots = [one.pages[at // size] * size + at % size for one, row in zip(sequences, positions, strict=True)
                 for at in row]  # fmt: skip
        width = max(len(one.pages) for one in sequences)
        table = [one.pages + [0] * (width - len(one.pages)) for one in sequences]
        counts = [len(row) for row in positions]

        def numbers(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Batch(
            ids=ids,
            positions=numbers([at for row in positions for at in row]),
            slots=numbers(slots),
            page_table=numbers(table, torch.int32),
            context_lengths=numbers([row[-1] + 1 for row in positions], torch.int32),
            query_starts=numbers([0, *torch.tensor(counts).cumsum(0).tolist()], torch.int32),
            max_queries=max(counts),
        )
