"""Steps that only answer, on a CPU: all kernels of all layers in one call, without Python in between.

The first steps of a size run as others do, and then one is recorded (`kernels/cpu/tape.py`). Its numbers are read from
tensors that stay, into which those of later steps are copied. Models that compute with torch between their kernels have
no tapes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder

if TYPE_CHECKING:
    from quantkit.kernels.cpu.tape import Tape

_MOST_SEQUENCES = 8  # more are bound by arithmetic
_ASKED_OFTEN = 3  # steps of a size before it is recorded: batches that are just draining pass each size once


class StepTapes:
    """Of one decoder and its cache. What a step returns is overwritten by the next one of the same size."""

    def __init__(self, decoder: Decoder, cache: KvCache, pages: int) -> None:
        """`pages` of the longest sequence."""
        self._decoder, self._cache, self._pages = decoder, cache, pages
        self._asked: Counter[int] = Counter()
        self._steps: dict[int, _Step | None] = {}  # None: there can be none

    def takes(self, batch: Batch) -> bool:
        one_each = batch.max_queries == 1 and len(batch.ids) == len(batch.context_lengths)
        return one_each and len(batch.ids) <= _MOST_SEQUENCES and batch.ancestors is None

    def run(self, batch: Batch) -> Tensor:
        """As `Decoder.hidden_states` of what it takes."""
        size = len(batch.ids)
        step = self._steps.get(size)
        if step is not None:
            return step.run(batch)
        self._asked[size] += 1
        if size in self._steps or self._asked[size] < _ASKED_OFTEN:
            return self._decoder.hidden_states(batch, self._cache)
        step = _Step(self._decoder, size, self._pages, batch)
        result = step.record(batch, self._cache)
        self._steps[size] = step if step.tape is not None else None
        return result


class _Step:
    def __init__(self, decoder: Decoder, size: int, pages: int, like: Batch) -> None:
        self.tape: Tape | None = None
        self._decoder = decoder
        self._received = torch.empty(size, decoder.config.hidden, dtype=decoder.weights.dtype)
        self._batch = Batch(
            ids=torch.empty_like(like.ids),
            positions=torch.empty_like(like.positions),
            kv_slots=torch.empty_like(like.kv_slots),
            page_table=torch.zeros(size, pages, dtype=like.page_table.dtype),
            context_lengths=torch.empty_like(like.context_lengths),
            query_starts=like.query_starts.clone(),
            max_queries=1,
        )

    def record(self, batch: Batch, cache: KvCache) -> Tensor:
        from quantkit.kernels.cpu.tape import record

        self._fill(batch)
        result, self.tape = record(lambda: self._decoder.hidden_states(self._batch, cache, self._received))
        return result

    def run(self, batch: Batch) -> Tensor:
        assert self.tape is not None
        self._fill(batch)
        return self.tape.run()

    def _fill(self, batch: Batch) -> None:
        own = self._batch
        self._received.copy_(self._decoder.embeddings(batch.ids, self._decoder.config.embedding_scale))
        own.positions.copy_(batch.positions)
        own.kv_slots.copy_(batch.kv_slots)
        own.context_lengths.copy_(batch.context_lengths)
        own.page_table[:, : batch.page_table.shape[1]].copy_(batch.page_table)
