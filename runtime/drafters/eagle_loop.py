"""An EAGLE head on the device: it reads what the model's steps leave, and guesses token by token from there.

Reading runs behind a step, before the host has seen what the step brought: the device knows which guesses held and what
was sampled behind them. Of every device row it keeps the newest feature and its position, from which `guess` goes on at
any time. Pages have the numbers of the model's, and what the head keeps of position t lies where the model keeps t.

On a GPU both are CUDA graphs, one for each padded size. A sequence with fewer tokens to read than the graph has its
padding in front, as in `decode_graphs.py`.
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
from quantkit.runtime.device.step_inputs import StepInputs
from quantkit.runtime.drafters.draft_loop import MOST_SEQUENCES, Behind, accepted_guesses, neutral_settings
from quantkit.runtime.drafters.eagle_decoder import EagleDecoder
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.ops import Ops
from quantkit.runtime.sampling.sampler import Settings


@dataclass(frozen=True)
class Wanted:
    """Of every sequence: its device row, how many guesses it wants, and how many tokens its pages hold."""

    rows: list[int]
    lengths: list[int]
    rooms: list[int]
    settings: Settings | None = None  # None: all are greedy


@dataclass(frozen=True)
class _Reading:
    """Tokens of sequences that all read as many: whose features go in, of which the last one's is kept."""

    ids: Tensor  # int64 [sequences, new], the tokens that follow
    positions: Tensor  # int64 [sequences, new]
    kv_slots: Tensor  # int64 [sequences, new]
    rows: Tensor  # int64 [sequences]
    contexts: Tensor  # int64 [sequences]
    states: Tensor  # [sequences, new, any], what the model's taps kept


@dataclass(frozen=True)
class _Key:
    sequences: int
    new: int  # tokens to read, or guesses
    drawn: bool | None = None  # None: a reading; False: greedy guesses


class EagleLoop:
    def __init__(
        self, decoder: EagleDecoder, cache: KvCache, ops: Ops, device_rows: DeviceRows, most: int, graphs: bool
    ) -> None:
        """For up to `most` guesses."""
        self._decoder, self._cache, self._ops, self._device_rows = decoder, cache, ops, device_rows
        self.sizes = graph_sizes(min(device_rows.num_rows, MOST_SEQUENCES)) if graphs else []
        sequences, device = self.sizes[-1] if graphs else 0, device_rows.device
        like = decoder.weights.dtype
        rows = device_rows.num_rows + 1
        self._features = torch.zeros(rows, decoder.config.hidden, dtype=like, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)  # of these features
        tokens = sequences * (1 + padded_guesses(most))
        self._numbers = torch.zeros(3 * tokens + 3 * sequences + 8, dtype=torch.int64, device=device)
        self._states = torch.zeros(tokens, decoder.state_width, dtype=like, device=device)
        self._settings = neutral_settings(sequences, device)
        self._logits = torch.empty(sequences * padded_guesses(most), decoder.config.vocab, dtype=like, device=device)
        self._graphs: dict[_Key, torch.cuda.CUDAGraph | PaperGraph] = {}
        self._pool: Any = None
        self._reading_seconds: dict[tuple[int, int], float] = {}  # of sequences, with so many guesses in front
        self.seconds: dict[tuple[int, int], float] = {}  # of sequences and guesses, with that reading

    def read_answers(self, step: StepRows, states: Tensor, behind: Behind, coins: list[bool], rows: list[int]) -> None:
        """The last known tokens of sequences and the guesses behind them that a step accepted; `states` are those of
        the step's sampled rows. Whatever stood behind them is forgotten."""
        new = 1 + max(behind.guesses)
        parts: list[list[int]] = [behind.logits_rows, behind.guesses, rows, [int(coin) for coin in coins]]
        key = self._padded(len(rows), new) if self._fits(len(rows)) else None
        numbers = self._device_rows.to_device([number for part in parts for number in part])
        first, guesses, device_rows, tossed = numbers.split([len(part) for part in parts])
        accepted = accepted_guesses(step, first, guesses, new - 1, tossed if coins else None)[1][:, None]
        entry = torch.arange(new if key is None else key.new, device=first.device)
        entry = entry - (len(entry) - 1 - accepted)  # the last one's follower is the token that was sampled
        at = first[:, None] + entry.clamp(min=0)
        following = step.ids[(at + 1).clamp(max=len(step.ids) - 1)]
        positions = step.positions[at]
        slots = self._kv_slots(self._device_rows.page_table[device_rows], positions)
        reading = _Reading(
            ids=torch.where(entry == accepted, step.sampled[at], following),
            positions=positions,
            kv_slots=torch.where(entry < 0, 0, slots),
            rows=device_rows,
            contexts=positions[:, -1] + 1,
            states=torch.where(entry[..., None] < 0, 0, states[at]),
        )
        if key is None:
            self._read(reading)
            return
        self._capture(key)
        self._fill(self._buffers(key), reading)
        self._graphs[key].replay()

    def read_chunks(self, inputs: StepInputs, states: Tensor, sampled: Tensor) -> None:
        """Parts of prompts; `ids` are the tokens that follow, but for those that were just sampled."""
        sent = self._device_rows.send(inputs)
        sent.ids[sent.logits_rows] = sampled
        batch = Batch(
            ids=sent.ids,
            positions=sent.positions,
            kv_slots=sent.kv_slots,
            page_table=self._device_rows.page_table[sent.rows],
            context_lengths=sent.contexts.int(),
            query_starts=sent.starts.int(),
            max_queries=inputs.max_queries,
            host_lengths=(inputs.starts, inputs.contexts),
        )
        features = self._decoder.advance(self._decoder.fused(states), batch, self._cache)
        self._features[sent.owner_rows] = features[sent.logits_rows]
        self._positions[sent.owner_rows] = sent.positions[sent.logits_rows]

    def guess(self, wanted: Wanted) -> Tensor | None:
        """Leaves guesses in the device rows of the sequences. The logits [most, sequences, vocab] that they were drawn
        from, unless all are greedy."""
        count, most = len(wanted.rows), max(wanted.lengths)
        numbers = self._device_rows.to_device([*wanted.rows, *wanted.lengths, *wanted.rooms]).view(3, -1)
        if not self._fits(count):
            shape = (most, count, self._decoder.config.vocab)
            kept = None if wanted.settings is None else self._logits.new_empty(shape)
            self._guess(numbers, most, wanted.settings, kept)
            return kept
        key = self.prepare(count, most, wanted.settings is not None)
        columns = self._columns(key)
        columns[0] = self._device_rows.padding
        columns[1:] = 0
        columns[:, :count] = numbers
        if wanted.settings is not None:
            for field in fields(Settings):
                getattr(self._settings, field.name)[:count].copy_(getattr(wanted.settings, field.name))
        self._graphs[key].replay()
        return self._kept(key)[:, :count].clone() if key.drawn else None  # others guess before these are verified

    def guesses(self, rows: list[int], count: int) -> Tensor:
        """What was guessed for these device rows, [sequences, count]."""
        return self._device_rows.tokens[self._device_rows.to_device(rows), 1 : 1 + count]

    def prepare(self, sequences: int, guesses: int, drawn: bool) -> _Key:
        """The padded sizes of a guess, whose graph is there afterwards, and that of the reading in front of it."""
        self.prepare_reading(sequences, guesses)
        key = _Key(self._padded(sequences, 1).sequences, padded_guesses(guesses), drawn)
        self._capture(key)
        return key

    def prepare_reading(self, sequences: int, guesses: int) -> None:
        self._capture(self._padded(sequences, 1 + guesses))

    def _fits(self, sequences: int) -> bool:
        return bool(self.sizes) and sequences <= self.sizes[-1]

    def _padded(self, sequences: int, new: int) -> _Key:
        return _Key(self.sizes[bisect_left(self.sizes, sequences)], 1 + padded_guesses(new - 1) if new > 1 else 1)

    @torch.inference_mode()
    def _capture(self, key: _Key) -> None:
        if key in self._graphs:
            return
        if key.drawn is None:
            buffers = self._buffers(key)
            self._clear(buffers)
            graph, seconds = timed_capture(lambda: self._read(buffers), self._pool)
            self._reading_seconds[key.sequences, key.new - 1] = seconds
        else:
            columns, kept = self._columns(key), self._kept(key) if key.drawn else None
            columns[0], columns[1:] = self._device_rows.padding, 0
            settings = self._settings.of(slice(key.sequences)) if key.drawn else None
            graph, seconds = timed_capture(lambda: self._guess(columns, key.new, settings, kept), self._pool)
            if not key.drawn or (key.sequences, key.new) not in self.seconds:
                self.seconds[key.sequences, key.new] = seconds + self._reading_seconds[key.sequences, key.new]
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def _buffers(self, key: _Key) -> _Reading:
        """Views of the same memory for every size; each begins on 16 bytes."""
        sequences, tokens = key.sequences, key.sequences * key.new
        views, start = [], 0
        for length in (tokens, tokens, tokens, sequences, sequences):
            views.append(self._numbers[start : start + length])
            start += length + length % 2
        ids, positions, slots = (view.view(sequences, key.new) for view in views[:3])
        states = self._states[:tokens].view(sequences, key.new, -1)
        return _Reading(ids, positions, slots, rows=views[3], contexts=views[4], states=states)

    def _clear(self, buffers: _Reading) -> None:
        """Nobody reads: a first token, in the padding page."""
        for field in fields(_Reading):
            getattr(buffers, field.name).zero_()
        buffers.rows.fill_(self._device_rows.padding)
        buffers.contexts.fill_(1)

    def _fill(self, buffers: _Reading, reading: _Reading) -> None:
        self._clear(buffers)
        for field in fields(_Reading):
            given = getattr(reading, field.name)
            getattr(buffers, field.name)[: len(given)].copy_(given)

    def _columns(self, key: _Key) -> Tensor:
        """Rows, lengths and rooms of a guess, each of even length."""
        stride = key.sequences + key.sequences % 2
        return self._numbers[: 3 * stride].view(3, stride)[:, : key.sequences]

    def _kept(self, key: _Key) -> Tensor:
        return self._logits[: key.new * key.sequences].view(key.new, key.sequences, -1)

    def _read(self, reading: _Reading) -> None:
        states = reading.states.flatten(0, 1)
        table = self._device_rows.page_table[reading.rows]
        batch = self._batch(reading.ids, reading.positions, table, reading.kv_slots, reading.contexts)
        features = self._decoder.advance(self._decoder.fused(states), batch, self._cache)
        self._features[reading.rows] = features.view(*reading.ids.shape, -1)[:, -1]
        self._positions[reading.rows] = reading.contexts - 1

    def _guess(self, columns: Tensor, most: int, settings: Settings | None, kept: Tensor | None) -> None:
        """The loop, on the device alone. Where it draws, the logits stay in `kept` [guesses, sequences, vocab]."""
        rows, lengths, rooms = columns.unbind()
        table, features, last = self._device_rows.page_table[rows], self._features[rows], self._positions[rows]
        lengths = torch.minimum(lengths, (rooms - last).clamp(min=0))
        tokens = rows
        for ahead in range(most):
            if ahead:
                at = (last + (lengths.clamp(max=ahead + 1) - 1).clamp(min=0))[:, None]
                slots = torch.where((lengths > ahead)[:, None], self._kv_slots(table, at), 0)
                batch = self._batch(tokens[:, None], at, table, slots, at[:, 0] + 1)
                features = self._decoder.advance(features, batch, self._cache)
            logits = self._decoder.guesses(features)
            if settings is None or kept is None:
                tokens = self._decoder.tokens(self._ops.greedy(logits)[0])
            else:
                s = settings
                kept[ahead] = self._decoder.whole(logits)
                step = last + 1 + ahead  # the position whose successor is guessed
                tokens, _ = self._ops.sample(kept[ahead], s.temperature, s.top_k, s.top_p, s.min_p, s.seed, step)
            self._device_rows.tokens[rows, 1 + ahead] = tokens

    def _kv_slots(self, table: Tensor, positions: Tensor) -> Tensor:
        size = self._cache.page_size
        return table.gather(1, positions // size).long() * size + positions % size

    def _batch(self, ids: Tensor, positions: Tensor, table: Tensor, slots: Tensor, contexts: Tensor) -> Batch:
        """Of sequences that all have as many new tokens."""
        count, new = ids.shape
        return Batch(
            ids=ids.flatten(),
            positions=positions.flatten(),
            kv_slots=slots.flatten(),
            page_table=table,
            context_lengths=contexts.int(),
            query_starts=new * torch.arange(count + 1, dtype=torch.int32, device=ids.device),
            max_queries=new,
        )
