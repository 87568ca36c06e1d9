"""What the device keeps of running sequences, one row each: the page table and the last token sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.runtime.pool import PADDING_PAGE
from quantkit.runtime.step_inputs import StepInputs


@dataclass(frozen=True)
class SentInputs:
    """`StepInputs` as int64 tensors on the device, and the place of every token."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    token_places: Tensor
    places: Tensor
    contexts: Tensor
    starts: Tensor
    rows: Tensor
    row_places: Tensor
    table_index: Tensor
    table_pages: Tensor


class Places:
    def __init__(self, count: int, table_width: int, device: torch.device) -> None:
        self.count = count
        self.device = device
        self.last_token = torch.zeros(count, dtype=torch.int64, device=device)
        self.page_table = torch.full((count, table_width), PADDING_PAGE, dtype=torch.int32, device=device)

    def send(self, inputs: StepInputs) -> SentInputs:
        """All numbers of a step in one copy."""
        counts = [after - before for before, after in zip(inputs.starts, inputs.starts[1:], strict=False)]
        token_places = [place for place, count in zip(inputs.places, counts, strict=True) for _ in range(count)]
        parts = [inputs.ids, inputs.positions, inputs.slots, token_places, inputs.places, inputs.contexts,
                 inputs.starts, inputs.rows, inputs.row_places, inputs.table_index, inputs.table_pages]  # fmt: skip
        # Each part begins on 16 bytes: Triton compiles a kernel again for pointers that do not.
        padded = [part + [0] * (len(part) % 2) for part in parts]
        flat = self.to_device([number for part in padded for number in part])
        views = flat.split([len(part) for part in padded])
        return SentInputs(*(view[: len(part)] for view, part in zip(views, parts, strict=True)))

    def to_device(self, numbers: list[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int64)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def update_table(self, inputs: StepInputs) -> None:
        """Page numbers that the device lacks, for a step whose other numbers travel another way."""
        if inputs.table_index:
            index, pages = self.to_device(inputs.table_index + inputs.table_pages).chunk(2)
            self.apply_table(index, pages)

    def apply_table(self, index: Tensor, pages: Tensor) -> None:
        if len(index):
            self.page_table.view(-1)[index] = pages.int()
