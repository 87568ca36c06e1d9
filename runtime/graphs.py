"""CUDA graphs of decoding steps: one for each padded number of sequences, captured when it is first needed.

A step of answers alone has the same kernels every time; only numbers change. They are copied into a fixed buffer, and
one launch replays all kernels of all layers. Padded rows read and write the padding page. The graphs share one pool of
memory, and the hidden states they leave are taken before the next one runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from quantkit.runtime.model import Batch, Decoder, KvCache
from quantkit.runtime.places import Places
from quantkit.runtime.step_inputs import StepInputs

_NUMBERS = 5  # of every sequence: id, position, slot, place, context
_ASKED_OFTEN = 8  # steps
_PADDING = (0, 0, 0, 0, 1)  # a first token, into page 0; its place is only read


def graph_sizes(most: int) -> list[int]:
    """Padded batch sizes: fine steps where a row costs most."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 1025, 32)]
    return [*(size for size in steps if size < most), most]


class DecodeGraphs:
    def __init__(self, decoder: Decoder, cache: KvCache, places: Places) -> None:
        self._decoder = decoder
        self._cache = cache
        self._places = places
        self.sizes = graph_sizes(places.count)
        hidden = decoder.config.hidden
        dtype = decoder.weights.embedding.dtype
        self._numbers = torch.zeros(_NUMBERS * self.sizes[-1], dtype=torch.int64, device=places.device)
        self._hidden = torch.zeros(self.sizes[-1], hidden, dtype=dtype, device=places.device)
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=places.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._asked: Counter[int] = Counter()
        self._pool: Any = None

    def takes(self, sequences: int) -> bool:
        return 0 < sequences <= self.sizes[-1]

    def prepare(self, sequences: int) -> int:
        """The padded size for so many sequences, whose graph is there afterwards.

        A capture takes as long as several steps, longer where kernels must be compiled. A size that is new takes the
        next larger graph instead until it has been asked for often: batches that are just draining pass each size once.
        """
        size = self.sizes[bisect_left(self.sizes, sequences)]
        if size in self._graphs:
            return size
        self._asked[size] += 1
        larger = min((known for known in self._graphs if known > size), default=None)
        if larger is not None and self._asked[size] <= _ASKED_OFTEN:
            return larger
        self.capture(size)
        return size

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, places and positions of the sequences, in their order."""
        count = len(inputs.places)
        size = self.prepare(count)
        columns = (inputs.ids, inputs.positions, inputs.slots, inputs.places, inputs.contexts)
        padded = [number for column, filler in zip(columns, _PADDING, strict=True)
                  for number in (*column, *[filler] * (size - count))]  # fmt: skip
        host = torch.tensor(padded, dtype=torch.int64).pin_memory()
        self._numbers[: len(padded)].copy_(host, non_blocking=True)
        self._graphs[size].replay()
        _, positions, _, places, _ = self._columns(size)
        return self._hidden[:count], places[:count], positions[:count]

    def _columns(self, size: int) -> tuple[Tensor, ...]:
        return self._numbers[: _NUMBERS * size].chunk(_NUMBERS)

    def capture(self, size: int) -> None:
        """Makes the graph of a size, unless it is there."""
        if size in self._graphs:
            return
        padding = torch.tensor(_PADDING, device=self._places.device).repeat_interleave(size)
        self._numbers[: _NUMBERS * size].copy_(padding)
        self._step(size)  # compiles kernels and sets libraries up, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph

    def _step(self, size: int) -> None:
        ids, positions, slots, places, contexts = self._columns(size)
        batch = Batch(
            ids=torch.where(ids < 0, self._places.last_token[places], ids),
            positions=positions.contiguous(),
            slots=slots.contiguous(),
            page_table=self._places.page_table[places],
            context_lengths=contexts.int(),
            query_starts=self._starts[: size + 1],
            max_queries=1,
        )
        self._hidden[:size].copy_(self._decoder.hidden_states(batch, self._cache))
