"""CUDA graphs of steps with prompts in them: one for each padded number of tokens and of sequences.

Such a step launches some 300 kernels, which takes the host longer than the device needs for a short prompt. In a graph
sizes are fixed, so the tokens are padded, and all padding is the prompt of one more sequence that belongs to nobody: it
reads and writes the padding page. Attention takes any mixture, so that the same graph serves one prompt, pieces of
several, and answers beside them. Steps of more tokens keep the device busy for longer than the host, and need no graph.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.runtime.core.step_result import Answered
from quantkit.runtime.device.decode_graphs import capture_graph
from quantkit.runtime.device.device_rows import Places
from quantkit.runtime.device.step_inputs import StepInputs
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder

TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
MOST_TOKENS = TOKENS[-1]
_FEW = 8  # sequences


@dataclass(frozen=True, order=True)
class PromptKey:
    """Padded sizes. `sequences` has one for the padding."""

    tokens: int
    sequences: int


class PromptGraphs:
    def __init__(self, decoder: Decoder, cache: KvCache, places: Places, pool: Any) -> None:
        """`pool` is the memory that all graphs share."""
        self._decoder = decoder
        self._cache = cache
        self._places = places
        self._pool = pool
        self._sequences = sorted({1 + min(_FEW, places.count), 1 + places.count})
        device, config = places.device, decoder.config
        self._numbers = torch.zeros(4 * MOST_TOKENS + 3 * places.count + 8, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(MOST_TOKENS, config.hidden, dtype=decoder.weights.embedding.dtype, device=device)
        self._ids = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device)
        self._graphs: dict[PromptKey, torch.cuda.CUDAGraph] = {}

    @property
    def keys(self) -> list[PromptKey]:
        """All that there may be, the largest first: its memory serves the others."""
        return sorted((PromptKey(tokens, count) for tokens in TOKENS for count in self._sequences), reverse=True)

    def takes(self, inputs: StepInputs) -> bool:
        return not inputs.ancestors and 0 < len(inputs.ids) <= MOST_TOKENS

    def run(self, inputs: StepInputs) -> tuple[Tensor, Answered]:
        """What comes behind all tokens, valid until the next step, and of the rows behind which a token is sampled."""
        key = self._padded(inputs)
        self.capture(key)
        numbers = _padded_numbers(inputs, key, self._places.padding, self._cache.page_size)
        fixed = len(numbers)
        sent = self._places.to_device(numbers + inputs.rows + inputs.row_places)
        self._numbers[:fixed].copy_(sent[:fixed])
        self._graphs[key].replay()
        every, positions = self._hidden[: len(inputs.ids)], self._columns(key)[1]
        at, places = sent[fixed:].split([len(inputs.rows), len(inputs.row_places)])
        return every, Answered(every[at], self._ids[at], places, positions[at])

    def capture(self, key: PromptKey) -> None:
        """Makes the graph of a size, unless it is there."""
        if key not in self._graphs:
            nothing = _padded_numbers(StepInputs(), key, self._places.padding, self._cache.page_size)
            self._numbers[: len(nothing)].copy_(self._places.to_device(nothing))
            self._graphs[key] = capture_graph(lambda: self._step(key), self._pool)

    def _padded(self, inputs: StepInputs) -> PromptKey:
        tokens = TOKENS[bisect_left(TOKENS, len(inputs.ids))]
        return PromptKey(tokens, self._sequences[bisect_left(self._sequences, len(inputs.places) + 1)])

    def _columns(self, key: PromptKey) -> tuple[Tensor, ...]:
        """Ids, positions, slots and places of tokens; places, contexts and starts of sequences."""
        lengths = [key.tokens] * 4 + [_even(key.sequences)] * 2 + [_even(key.sequences + 1)]
        views = self._numbers[: sum(lengths)].split(lengths)
        return (*views[:4], views[4][: key.sequences], views[5][: key.sequences], views[6][: key.sequences + 1])

    def _step(self, key: PromptKey) -> None:
        ids, positions, slots, owners, places, contexts, starts = self._columns(key)
        self._ids[: key.tokens].copy_(self._places.resolve(ids, owners))
        batch = Batch(
            ids=self._ids[: key.tokens],
            positions=positions,
            slots=slots,
            page_table=self._places.page_table[places],
            context_lengths=contexts.int(),
            query_starts=starts.int(),
            max_queries=key.tokens,
        )
        self._hidden[: key.tokens].copy_(self._decoder.hidden_states(batch, self._cache))


def _padded_numbers(inputs: StepInputs, key: PromptKey, nobody: int, page_size: int) -> list[int]:
    """The columns of a step, each of an even length, so that it begins on 16 bytes."""
    tokens, sequences = len(inputs.ids), len(inputs.places)
    padding, unused = key.tokens - tokens, key.sequences - sequences - 1
    places_in_page = [at % page_size for at in range(padding)]  # all of the padding page, so that it holds numbers
    owners = [place for place, count in zip(inputs.places, inputs.counts, strict=True) for _ in range(count)]
    columns = (
        [*inputs.ids, *[0] * padding],
        [*inputs.positions, *places_in_page],
        [*inputs.slots, *places_in_page],
        [*owners, *[nobody] * padding],
        [*inputs.places, *[nobody] * (unused + 1)],
        [*inputs.contexts, *[1] * unused, max(padding, 1)],
        [*inputs.starts, *[tokens] * unused, key.tokens],
    )
    return [number for column in columns for number in (*column, *[0] * (len(column) % 2))]


def _even(length: int) -> int:
    return length + length % 2
