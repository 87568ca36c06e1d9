"""A draft model guesses token by token for many sequences at once; on a GPU the whole loop is one CUDA graph.

Every sequence begins with its last two known tokens: the draft has read the first of them already, unless it was the
last guess of a draft that held, which nobody read. So the loop has the same kernels whatever was accepted before. A
sequence whose draft is shorter than the loop goes on guessing into the padding page.

The loop can be queued behind a step of the target before the host has seen what that step accepted (`run_behind`): the
device knows the last two tokens and their positions. Then it never waits for the host.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from quantkit.runtime.core.step_result import StepRows
from quantkit.runtime.device.decode_graphs import PaperGraph, graph_sizes, padded_guesses, timed_capture
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder
from quantkit.runtime.model.ops import Ops
from quantkit.runtime.sampling.sampler import Settings

MOST_SEQUENCES = 128  # with more, guessing does not pay
_NUMBERS = 6  # of every sequence: two ids, position, device row, length, room


@dataclass(frozen=True)
class LoopInputs:
    """Of every sequence: its last two tokens, the position of the last, its device row, how many guesses it wants, and
    how many tokens its pages hold."""

    ids: list[tuple[int, ...]]
    positions: list[int]
    rows: list[int]
    lengths: list[int]
    rooms: list[int]
    settings: Settings | None = None  # None: all are greedy


@dataclass(frozen=True)
class Behind:
    """Of every sequence of a loop behind a step: its first logits row there, and how many guesses were verified."""

    logits_rows: list[int]
    guesses: list[int]


@dataclass(frozen=True)
class _Key:
    sequences: int
    guesses: int
    drawn: bool  # else greedy


class DraftLoop:
    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        ops: Ops,
        device_rows: DeviceRows,
        most: int,
        graphs: bool,
        unknown: tuple[int, ...] = (),
    ) -> None:
        """For up to `most` guesses, none of which is an `unknown` token."""
        self._decoder = decoder
        self._cache = cache
        self._ops = ops
        self._device_rows = device_rows
        self._unknown = torch.tensor(unknown, device=device_rows.device) if unknown else None
        self.sizes = graph_sizes(min(device_rows.num_rows, MOST_SEQUENCES)) if graphs else []
        sequences = self.sizes[-1] if graphs else 0
        self._numbers = torch.zeros(_NUMBERS * (sequences + 1), dtype=torch.int64, device=device_rows.device)
        self._settings = neutral_settings(sequences, device_rows.device)
        # All graphs leave their logits in the same place, or each would keep its own for ever.
        kept, weights = sequences * padded_guesses(most), decoder.weights
        self._logits = weights.embedding.new_empty(kept, decoder.config.vocab, dtype=weights.dtype)
        self._graphs: dict[_Key, torch.cuda.CUDAGraph | PaperGraph] = {}
        self._pool: Any = None
        self.seconds: dict[tuple[int, int], float] = {}  # sequences, guesses

    def run(self, inputs: LoopInputs) -> tuple[Tensor, Tensor | None]:
        """Guesses [sequences, most], which are in the device rows of the sequences too; and the logits
        [most, sequences, vocab] that they were drawn from, unless all are greedy. Valid until the next call."""
        logits = self._run(inputs, None)
        return self._guesses(inputs.rows, max(inputs.lengths)), logits

    def run_behind(self, step: StepRows, behind: Behind, coins: list[bool], inputs: LoopInputs) -> Tensor | None:
        """The same behind a step that was launched; ids and positions of the inputs are found there. The logits."""
        count = max(behind.guesses)
        numbers = self._device_rows.to_device([*behind.logits_rows, *behind.guesses, *coins])
        first, guesses, tossed = numbers.split([len(behind.logits_rows), len(behind.guesses), len(coins)])
        at, accepted = accepted_guesses(step, first, guesses, count, tossed if coins else None)
        last = torch.stack([step.ids[at], step.sampled[at]]).gather(2, accepted.expand(2, -1)[:, :, None])[:, :, 0]
        position = (step.positions[first] + accepted + 1).clamp(max=self._device_rows.max_context - 1)
        return self._run(inputs, torch.cat([last, position[None]]))

    def _run(self, inputs: LoopInputs, found: Tensor | None) -> Tensor | None:
        """Numbers that only the device knows, `found`, take the place of the first ones."""
        count, guesses = len(inputs.rows), max(inputs.lengths)
        if not self.sizes or count > self.sizes[-1]:
            numbers = self._device_rows.to_device(_numbers(inputs, count, self._device_rows.padding))
            columns = numbers.view(_NUMBERS, -1)[:, :count]
            if found is not None:
                columns[: len(found)] = found
            kept = None
            if inputs.settings is not None:
                kept = self._logits.new_empty(guesses, count, self._logits.shape[1])
            self._guess(columns, guesses, inputs.settings, kept)
            return kept
        key = self.prepare(count, guesses, inputs.settings is not None)
        host = torch.tensor(_numbers(inputs, key.sequences, self._device_rows.padding), dtype=torch.int64)
        host = host.pin_memory() if self._numbers.is_cuda else host
        self._numbers[: len(host)].copy_(host, non_blocking=True)
        if found is not None:
            self._numbers[: len(host)].view(_NUMBERS, -1)[: len(found), :count] = found
        if inputs.settings is not None:
            for field in fields(Settings):
                getattr(self._settings, field.name)[:count].copy_(getattr(inputs.settings, field.name))
        self._graphs[key].replay()
        return self._kept(key)[:, :count] if key.drawn else None

    def prepare(self, sequences: int, guesses: int, drawn: bool) -> _Key:
        """The padded sizes, whose graph is there afterwards."""
        key = _Key(self.sizes[bisect_left(self.sizes, sequences)], padded_guesses(guesses), drawn)
        if key not in self._graphs:
            self._capture(key)
        return key

    @torch.inference_mode()
    def _capture(self, key: _Key) -> None:
        padding = LoopInputs([], [], [], [], [])
        self._numbers[: _NUMBERS * (key.sequences + key.sequences % 2)].copy_(
            self._device_rows.to_device(_numbers(padding, key.sequences, self._device_rows.padding))
        )

        def step() -> None:
            stride = key.sequences + key.sequences % 2
            columns = self._numbers[: _NUMBERS * stride].view(_NUMBERS, stride)[:, : key.sequences]
            settings = self._settings.of(slice(key.sequences)) if key.drawn else None
            self._guess(columns, key.guesses, settings, self._kept(key) if key.drawn else None)

        graph, seconds = timed_capture(step, self._pool)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        if not key.drawn or (key.sequences, key.guesses) not in self.seconds:
            self.seconds[key.sequences, key.guesses] = seconds

    def _kept(self, key: _Key) -> Tensor:
        """Where the graph of this size leaves logits [guesses, sequences, vocab]."""
        return self._logits[: key.guesses * key.sequences].view(key.guesses, key.sequences, -1)

    def _guesses(self, rows: list[int], count: int) -> Tensor:
        return self._device_rows.tokens[self._device_rows.to_device(rows), 1 : 1 + count]

    def _guess(self, columns: Tensor, guesses: int, settings: Settings | None, kept: Tensor | None) -> None:
        """The loop, on the device alone. Where it draws, the logits stay in `kept` [guesses, sequences, vocab]."""
        *ids, positions, rows, lengths, rooms = columns.unbind()
        lengths = torch.minimum(lengths, (rooms - positions).clamp(min=0))
        table = self._device_rows.page_table[rows]
        steps = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        both = torch.stack([positions - 1, positions], 1)
        kv_slots = torch.where(both < rooms[:, None], self._kv_slots(table, both), 0)
        first = self._batch(torch.stack(ids, 1), both, table, kv_slots, 2 * steps, 2)
        hidden = self._decoder.hidden_states(first, self._cache)[1::2]
        tokens = positions
        for ahead in range(guesses):
            if ahead:
                at = (positions + (lengths.clamp(max=ahead + 1) - 1).clamp(min=0))[:, None]
                kv_slots = torch.where((lengths > ahead)[:, None], self._kv_slots(table, at), 0)
                hidden = self._decoder.hidden_states(
                    self._batch(tokens[:, None], at, table, kv_slots, steps, 1), self._cache
                )
            logits = self._decoder.logits(hidden)
            if self._unknown is not None:
                logits.index_fill_(1, self._unknown, float("-inf"))
            if settings is None or kept is None:
                tokens, _ = self._ops.greedy(logits)
            else:
                s = settings
                tokens, _ = self._ops.sample(
                    logits, s.temperature, s.top_k, s.top_p, s.min_p, s.seed, positions + ahead
                )
                kept[ahead] = logits
            self._device_rows.tokens[rows, 1 + ahead] = tokens

    def _kv_slots(self, table: Tensor, positions: Tensor) -> Tensor:
        size = self._cache.page_size
        return table.gather(1, positions // size).long() * size + positions % size

    def _batch(self, ids: Tensor, positions: Tensor, table: Tensor, slots: Tensor, starts: Tensor, new: int) -> Batch:
        return Batch(
            ids=ids.flatten(),
            positions=positions.flatten(),
            kv_slots=slots.flatten(),
            page_table=table,
            context_lengths=(positions[:, -1] + 1).int(),
            query_starts=starts,
            max_queries=new,
        )


def accepted_guesses(
    step: StepRows, first: Tensor, guesses: Tensor, most: int, tossed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of sequences with these first rows in a step and so many guesses, `most` at most: the rows of the last known
    token and the guesses, [sequences, 1 + most], and how many guesses held. `tossed` decides instead, where it is."""
    ahead = torch.arange(most + 1, device=first.device)
    at = first[:, None] + torch.minimum(ahead, guesses[:, None])
    right = step.sampled[at[:, :-1]] == step.ids[at[:, 1:]] if tossed is None else tossed[at[:, 1:]].bool()
    return at, (right & (ahead[:-1] < guesses[:, None])).int().cumprod(1).sum(1)


def _numbers(inputs: LoopInputs, sequences: int, nobody: int) -> list[int]:
    """Columns for so many sequences, each of even length. Padding has its two tokens in the padding page."""
    missing = sequences - len(inputs.rows)
    firsts, lasts = ([ids[number] for ids in inputs.ids] + [0] * missing for number in (0, 1))
    columns = [firsts, lasts, inputs.positions + [1] * missing, inputs.rows + [nobody] * missing,
               inputs.lengths + [0] * missing, inputs.rooms + [0] * missing]  # fmt: skip
    return [number for column in columns for number in (*column, *[0] * (sequences % 2))]


def neutral_settings(count: int, device: torch.device) -> Settings:
    """Parameters that sample from everything."""
    ones = torch.ones(count, device=device)
    return Settings(
        temperature=ones.clone(),
        top_k=torch.zeros(count, dtype=torch.int32, device=device),
        top_p=ones.clone(),
        min_p=torch.zeros(count, device=device),
        seed=torch.zeros(count, dtype=torch.int64, device=device),
    )
