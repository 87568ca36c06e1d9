"""CUDA graphs of steps that only answer: one for each padded number of sequences and of new tokens in each of them,
captured when it is first needed.

Such a step has the same kernels every time; only numbers change. They are copied into a fixed buffer, and one launch
replays all kernels of all layers. A sequence with fewer new tokens than the graph has its padding in front: those rows
see what is there, and what they write goes to the padding page. Trees of guesses have graphs of their own. The graphs
share one pool of memory, and the hidden states they leave are taken before the next one runs. Each is timed when it is
made: speculation asks what a step costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.card import pretending
from quantkit.runtime.core.step_plan import MOST_GUESSES
from quantkit.runtime.core.step_result import LogitsRows
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.device.peers import Alone, Peers
from quantkit.runtime.device.step_inputs import StepInputs, in_one
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12, MOST_GUESSES)  # that a graph is made for; others are padded
_NEW_TOKENS = (1, *(1 + length for length in DRAFT_LENGTHS))
_MOST_TOKENS = 512  # of a graph with guesses; larger steps are not bound by launches
_ASKED_OFTEN = 8  # steps
_REPLAYS = 3  # that are timed
_PAPER_SECONDS = 0.01  # that a step takes where nothing is computed
_PADDED_CONTEXT = 1  # a first token, in page 0


@dataclass(frozen=True, order=True)
class Key:
    sequences: int
    new: int  # tokens of each
    tree: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.new


def graph_sizes(most: int) -> list[int]:
    """Padded batch sizes: fine steps where a row costs most."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 1025, 32), *range(1088, most, 64)]
    return [*(size for size in steps if size < most), most]


def padded_guesses(guesses: int) -> int:
    return DRAFT_LENGTHS[bisect_left(DRAFT_LENGTHS, guesses)]


@dataclass(frozen=True)
class PaperGraph:
    """What a graph would replay, on a card that is not here."""

    replay: Callable[[], None]

    def pool(self) -> None:
        """It takes no memory."""


def capture_graph(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph | PaperGraph:
    step()  # compiles kernels and sets libraries up, which a capture must not
    if pretending():
        return PaperGraph(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph


def timed_capture(step: Callable[[], None], pool: Any) -> tuple[torch.cuda.CUDAGraph | PaperGraph, float]:
    """The graph of a function, and the seconds that a replay takes."""
    graph = capture_graph(step, pool)
    if isinstance(graph, PaperGraph):
        return graph, _PAPER_SECONDS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return graph, begin.elapsed_time(end) / 1000 / _REPLAYS


class StepGraphs:
    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        device_rows: DeviceRows,
        peers: Peers = Alone(),  # noqa: B008  (has no state)
    ) -> None:
        """`peers` are told of every capture. Within a step other ranks make a graph by themselves, and find it there
        when they are told."""
        self._peers = peers
        self._decoder = decoder
        self._cache = cache
        self._device_rows = device_rows
        self.sizes = graph_sizes(device_rows.num_rows)
        device, most = device_rows.device, max(self.sizes[-1], _MOST_TOKENS)
        dtype = decoder.weights.dtype
        self._numbers = torch.zeros(4 * most + 2 * self.sizes[-1] + 8, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(most, decoder.config.hidden, dtype=dtype, device=device)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._steps = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._graphs: dict[Key, torch.cuda.CUDAGraph | PaperGraph] = {}
        self._asked: Counter[Key] = Counter()
        self.pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.seconds: dict[tuple[int, int], float] = {}  # of sequences with so many new tokens

    def takes(self, sequences: int, queries: int = 1, tree: bool = False) -> bool:
        if not 0 < sequences <= self.sizes[-1] or queries > _NEW_TOKENS[-1]:
            return False
        key = self._padded(sequences, queries, tree)
        return key.new == 1 or key.tokens <= _MOST_TOKENS

    def _padded(self, sequences: int, queries: int, tree: bool) -> Key:
        """Trees are not padded: attention takes just as many nodes as a tile has rows."""
        size = self.sizes[bisect_left(self.sizes, sequences)]
        return Key(size, queries if tree else _NEW_TOKENS[bisect_left(_NEW_TOKENS, queries)], tree)

    def prepare(self, sequences: int, queries: int = 1, tree: bool = False) -> Key:
        """The padded sizes for a step, whose graph is there afterwards.

        A capture takes as long as several steps, longer where kernels must be compiled. A size that is new takes the
        next larger graph instead until it has been asked for often: batches that are just draining pass each size once.
        """
        key = self._padded(sequences, queries, tree)
        if key in self._graphs:
            return key
        self._asked[key] += 1
        alike = (known for known in self._graphs if (known.new, known.tree) == (key.new, key.tree))
        larger = min((known for known in alike if known.sequences > key.sequences), default=None)
        if larger is not None and self._asked[key] <= _ASKED_OFTEN:
            return larger
        self.capture(key)
        return key

    def run(self, inputs: StepInputs) -> LogitsRows:
        """Every token of the step is one behind which a token is sampled."""
        counts = inputs.num_new
        key = self.prepare(len(counts), max(counts), bool(inputs.ancestors))
        numbers = padded_numbers(inputs, counts, key, self._device_rows.padding)
        fixed, queries = len(numbers), key.new
        if queries > 1:
            numbers += [sequence * queries + queries - count + new for sequence, count in enumerate(counts)
                        for new in range(count)]  # fmt: skip
        sent = self._device_rows.to_device(numbers)
        self._numbers[:fixed].copy_(sent[:fixed])
        self._graphs[key].replay()
        _, positions, _, _, rows, _ = self._columns(key)
        tapped = self._decoder.tapped
        if queries == 1:
            first = slice(len(counts))
            return LogitsRows(self._hidden[first], self._ids[first], rows[first], positions[first], tapped(first))
        at = sent[fixed:]
        return LogitsRows(self._hidden[at], self._ids[at], rows[at // queries], positions[at], tapped(at))

    def _columns(self, key: Key) -> tuple[Tensor, ...]:
        """Views of the buffer, each begins on 16 bytes: ids, positions, KV slots, ancestors; rows, contexts."""
        lengths = [key.tokens] * 3 + [key.tokens * key.tree] + [key.sequences] * 2
        views, start = [], 0
        for length in lengths:
            views.append(self._numbers[start : start + length])
            start += length + length % 2
        return tuple(views)

    def capture(self, key: Key) -> None:
        """Makes the graph of a size, unless it is there."""
        if key in self._graphs:
            return
        with self._peers.capturing(key.sequences, key.new, key.tree):
            for column, filler in zip(self._columns(key), _padding(self._device_rows.padding), strict=True):
                column.fill_(filler)
            graph, seconds = timed_capture(lambda: self._step(key), self.pool)
        self._graphs[key] = graph
        self.seconds[key.sequences, key.new] = seconds

    def _step(self, key: Key) -> None:
        ids, positions, kv_slots, ancestors, rows, contexts = self._columns(key)
        token_rows = rows if key.new == 1 else rows.repeat_interleave(key.new, output_size=key.tokens)
        self._ids[: key.tokens].copy_(self._device_rows.resolve(ids, token_rows))
        batch = Batch(
            ids=self._ids[: key.tokens],
            positions=positions,
            kv_slots=kv_slots,
            page_table=self._device_rows.page_table[rows],
            context_lengths=contexts.int(),
            query_starts=self._steps[: key.tokens + 1 : key.new].contiguous(),
            max_queries=key.new,
            ancestors=ancestors if key.tree else None,
        )
        self._hidden[: key.tokens].copy_(self._decoder.hidden_states(batch, self._cache))


def _padding(row: int) -> tuple[int, ...]:
    return (0, 0, 0, 0, row, _PADDED_CONTEXT)


def padded_numbers(inputs: StepInputs, counts: list[int], key: Key, nobody: int) -> list[int]:
    """Ids, positions, KV slots and ancestors with padding in front of each sequence's, then rows and contexts."""
    missing = key.sequences - len(counts)
    columns: list[list[int]] = []
    for column in (inputs.ids, inputs.positions, inputs.kv_slots):
        padded = _spread(column, inputs.starts, counts, key.new)
        columns.append([*padded, *[0] * (missing * key.new)])
    columns.append([*_seen_behind_padding(inputs, counts, key.new), *[0] * (missing * key.new)] if key.tree else [])
    columns.append([*inputs.rows, *[nobody] * missing])
    columns.append([*inputs.contexts, *[_PADDED_CONTEXT] * missing])
    return in_one(columns)


def _spread(column: list[int], starts: list[int], counts: list[int], new: int) -> list[int]:
    if new == 1:
        return column
    spread: list[int] = []
    for start, count in zip(starts, counts, strict=False):
        spread += [0] * (new - count)
        spread += column[start : start + count]
    return spread


def _seen_behind_padding(inputs: StepInputs, counts: list[int], new: int) -> list[int]:
    """Where padding stands, attention looks for new tokens; real rows see there the old ones that they are."""
    seen: list[int] = []
    for start, count in zip(inputs.starts, counts, strict=False):
        padding = new - count
        seen += [0] * padding
        seen += [(bits << padding) | ((1 << padding) - 1) for bits in inputs.ancestors[start : start + count]]
    return seen
