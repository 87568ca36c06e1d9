"""What one process holds of a model and does for a step: its blocks, its cache, the page table.

A process alone holds all of it. With several ranks (`runtime/parallel/`) every one gets the numbers of a step, moves
its pages and computes its part.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from quantkit.runtime.core.step_result import LogitsRows
from quantkit.runtime.device.decode_graphs import StepGraphs
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.device.host_pages import HostPages
from quantkit.runtime.device.prompt_graphs import PromptGraphs
from quantkit.runtime.device.step_inputs import PageMoves, StepInputs
from quantkit.runtime.device.step_tapes import StepTapes
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import Decoder
from quantkit.runtime.model.taps import Taps


class BusyClock:
    """Seconds in which this process computed. Costs nothing while it is off."""

    def __init__(self, device: torch.device, on: bool = False) -> None:
        self.on = on
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._begin = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self.on and self._cuda:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()
        elif self.on:
            self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self.on and self._cuda:
            self._events[-1][1].record()
        elif self.on:
            self._seconds += time.perf_counter() - self._begin

    def take(self) -> float:
        """Since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        for begin, end in self._events:
            end.synchronize()
            seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        return seconds


class ModelPart:
    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        device_rows: DeviceRows,
        graphs: StepGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
        tapes: StepTapes | None = None,
        timed: bool = False,
        host_bytes: int = 0,
    ) -> None:
        """`timed`: its clock counts, as one of several stages. `host_bytes` are for pages of those who give way."""
        self.decoder = decoder
        self.cache = cache
        self.device_rows = device_rows
        self.graphs = graphs
        self.prompt_graphs = prompt_graphs
        self.tapes = tapes
        self.clock = BusyClock(cache.pages.device, timed)
        self.host_pages = HostPages(cache.pages, host_bytes)

    @property
    def device(self) -> torch.device:
        return self.cache.pages.device

    @torch.inference_mode()
    def move(self, moves: PageMoves) -> None:
        pages = self.cache.pages
        for sequence in moves.dropped:
            self.host_pages.drop(sequence)
        for sequence, taken in moves.out:
            self.host_pages.take(sequence, taken)
        for sequence, given in moves.back:
            self.host_pages.give(sequence, given)
        if moves.copies:
            source, target = (torch.tensor(side, device=self.device) for side in zip(*moves.copies, strict=True))
            pages[:, :, target] = pages[:, :, source]

    def run(self, inputs: StepInputs, received: Tensor | None = None) -> tuple[Tensor | None, LogitsRows]:
        """What comes behind this part's blocks: of all tokens (None where all are answers), and of the rows behind
        which a token is sampled. `received` comes from the blocks before, where these are another's."""
        if self.graphs is not None and self._has_graph(self.graphs, inputs):
            return None, self.graphs.run(inputs)
        if self.prompt_graphs is not None and self.prompt_graphs.takes(inputs):
            return self.prompt_graphs.run(inputs)
        batch, at, owner_rows = self._batch(inputs)
        if self.tapes is not None and received is None and self.tapes.takes(batch):
            every = self.tapes.run(batch)
        else:
            every = self.decoder.hidden_states(batch, self.cache, received)
        features = self.decoder.tapped(slice(len(batch.ids)))
        return every, LogitsRows(every[at], batch.ids[at], owner_rows, batch.positions[at], features)

    def tap(self, taps: Taps) -> None:
        """Every step from now on leaves hidden states there. Call before graphs are captured."""
        self.decoder.taps = taps
        self.tapes = None  # a tape has no room for copies

    def _has_graph(self, graphs: StepGraphs, inputs: StepInputs) -> bool:
        answers_only = len(inputs.logits_rows) == len(inputs.ids)
        return answers_only and graphs.takes(len(inputs.rows), inputs.max_queries, bool(inputs.ancestors))

    def _batch(self, inputs: StepInputs) -> tuple[Batch, Tensor, Tensor]:
        """One copy to the device, then views of it."""
        tensors = self.device_rows.send(inputs)
        known = min(inputs.ids) >= 0
        width = max(-(-max(inputs.contexts) // self.cache.page_size), 1)
        batch = Batch(
            ids=tensors.ids if known else self.device_rows.resolve(tensors.ids, tensors.token_rows),
            positions=tensors.positions,
            kv_slots=tensors.kv_slots,
            page_table=self.device_rows.page_table[tensors.rows, :width],
            context_lengths=tensors.contexts.int(),
            query_starts=tensors.starts.int(),
            max_queries=inputs.max_queries,
            ancestors=tensors.ancestors if inputs.ancestors else None,
            host_lengths=(inputs.starts, inputs.contexts),
        )
        return batch, tensors.logits_rows, tensors.owner_rows


def to_host(tensor: Tensor) -> Tensor:
    """Into pinned memory, without waiting. What has no numbers brings zeros."""
    if tensor.device.type == "meta":
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
