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

from quantkit.runtime.core.step_result import LogitsRows
from quantkit.runtime.device.decode_graphs import PaperGraph, capture_graph
from quantkit.runtime.device.device_rows import LONGEST_PADDING, DeviceRows
from quantkit.runtime.device.step_inputs import StepInputs, in_one
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder

MOST_TOKENS = LONGEST_PADDING
TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, MOST_TOKENS)
_FEW = 8  # sequences


@dataclass(frozen=True, order=True)
class PromptKey:
    """Padded sizes. `sequences` has one for the padding."""

    tokens: int
    sequences: int


class PromptGraphs:
    def __init__(self, decoder: Decoder, cache: KvCache, device_rows: DeviceRows, pool: Any) -> None:
        """`pool` is the memory that all graphs share."""
        self._decoder = decoder
        self._cache = cache
        self._device_rows = device_rows
        self._pool = pool
        most = min(device_rows.num_rows, MOST_TOKENS)  # each has a token
        self._sequences = sorted({1 + min(_FEW, most), 1 + most})
        device, config = device_rows.device, decoder.config
        self._numbers = torch.zeros(4 * MOST_TOKENS + 3 * device_rows.num_rows + 8, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(MOST_TOKENS, config.hidden, dtype=decoder.weights.dtype, device=device)
        self._ids = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device)
        self._graphs: dict[PromptKey, torch.cuda.CUDAGraph | PaperGraph] = {}

    @property
    def keys(self) -> list[PromptKey]:
        """All that there may be, the largest first: its memory serves the others."""
        return sorted((PromptKey(tokens, count) for tokens in TOKENS for count in self._sequences), reverse=True)

    def takes(self, inputs: StepInputs) -> bool:
        """Not pieces whose latents are expanded: how many of these there are changes from step to step."""
        if inputs.ancestors or not 0 < len(inputs.ids) <= MOST_TOKENS:
            return False
        latent = self._decoder.config.latent
        return latent is None or inputs.max_queries <= latent.most_absorbed

    def run(self, inputs: StepInputs) -> tuple[Tensor, LogitsRows]:
        """What comes behind all tokens, valid until the next step, and of the rows behind which a token is sampled."""
        key = self._padded(inputs)
        self.capture(key)
        numbers = _padded_numbers(inputs, key, self._device_rows.padding, self._cache.page_size)
        fixed = len(numbers)
        sent = self._device_rows.to_device(numbers + inputs.logits_rows + inputs.owner_rows)
        self._numbers[:fixed].copy_(sent[:fixed])
        self._graphs[key].replay()
        every, positions = self._hidden[: len(inputs.ids)], self._columns(key)[1]
        at, owner_rows = sent[fixed:].split([len(inputs.logits_rows), len(inputs.owner_rows)])
        features = self._decoder.tapped(slice(len(inputs.ids)))
        return every, LogitsRows(every[at], self._ids[at], owner_rows, positions[at], features)

    def capture(self, key: PromptKey) -> None:
        """Makes the graph of a size, unless it is there."""
        if key not in self._graphs:
            nothing = _padded_numbers(StepInputs(), key, self._device_rows.padding, self._cache.page_size)
            self._numbers[: len(nothing)].copy_(self._device_rows.to_device(nothing))
            self._graphs[key] = capture_graph(lambda: self._step(key), self._pool)

    def _padded(self, inputs: StepInputs) -> PromptKey:
        tokens = TOKENS[bisect_left(TOKENS, len(inputs.ids))]
        return PromptKey(tokens, self._sequences[bisect_left(self._sequences, len(inputs.rows) + 1)])

    def _columns(self, key: PromptKey) -> tuple[Tensor, ...]:
        """Ids, positions, KV slots and rows of tokens; rows, contexts and starts of sequences."""
        lengths = [key.tokens] * 4 + [_even(key.sequences)] * 2 + [_even(key.sequences + 1)]
        views = self._numbers[: sum(lengths)].split(lengths)
        return (*views[:4], views[4][: key.sequences], views[5][: key.sequences], views[6][: key.sequences + 1])

    def _step(self, key: PromptKey) -> None:
        ids, positions, kv_slots, token_rows, rows, contexts, starts = self._columns(key)
        self._ids[: key.tokens].copy_(self._device_rows.resolve(ids, token_rows))
        batch = Batch(
            ids=self._ids[: key.tokens],
            positions=positions,
            kv_slots=kv_slots,
            page_table=self._device_rows.page_table[rows],
            context_lengths=contexts.int(),
            query_starts=starts.int(),
            max_queries=key.tokens,
        )
        self._hidden[: key.tokens].copy_(self._decoder.hidden_states(batch, self._cache))


def _padded_numbers(inputs: StepInputs, key: PromptKey, nobody: int, page_size: int) -> list[int]:
    """The columns of a step in one."""
    tokens, sequences = len(inputs.ids), len(inputs.rows)
    padding, unused = key.tokens - tokens, key.sequences - sequences - 1
    slots_in_page = [at % page_size for at in range(padding)]  # all of the padding page, so that it holds numbers
    columns = (
        [*inputs.ids, *[0] * padding],
        [*inputs.positions, *[0] * padding],
        [*inputs.kv_slots, *slots_in_page],
        [*inputs.token_rows, *[nobody] * padding],
        [*inputs.rows, *[nobody] * (unused + 1)],
        [*inputs.contexts, *[1] * unused, max(padding, 1)],
        [*inputs.starts, *[tokens] * unused, key.tokens],
    )
    return in_one(columns)


def _even(length: int) -> int:
    return length + length % 2
