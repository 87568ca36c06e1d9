"""What the device keeps of running sequences, one row each: the page table, the last token sampled, and guesses.

The row behind the last one belongs to nobody: padding reads and writes it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.core.step_plan import FROM_PLACE, MOST_GUESSES
from quantkit.runtime.device.step_inputs import StepInputs
from quantkit.runtime.model.tensor_group import Group, OneRank


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
    ancestors: Tensor


class Places:
    def __init__(
        self,
        count: int,
        table_width: int,
        device: torch.device,
        group: Group = OneRank(),  # noqa: B008  (has no state)
    ) -> None:
        """Of a `group` of ranks that all have such places, the first one's tokens count."""
        self.count = count
        self.device = device
        self._group = group
        self.tokens = torch.zeros((count + 1, 1 + MOST_GUESSES), dtype=torch.int64, device=device)  # last one, guesses
        self.page_table = torch.full((count + 1, table_width), PADDING_PAGE, dtype=torch.int32, device=device)

    def alone(self) -> Places:
        """The same rows for a model that this rank runs alone, as a draft: no other rank is asked for tokens."""
        places = copy(self)
        places._group = OneRank()
        return places

    @property
    def padding(self) -> int:
        return self.count

    def resolve(self, ids: Tensor, places: Tensor) -> Tensor:
        """Token ids, of which negative ones say where on the device the token is (`core/step_plan.py`)."""
        return self._group.broadcast(torch.where(ids < 0, self.tokens[places, (FROM_PLACE - ids).clamp(min=0)], ids))

    def send(self, inputs: StepInputs) -> SentInputs:
        """All numbers of a step in one copy."""
        token_places = [place for place, count in zip(inputs.places, inputs.counts, strict=True) for _ in range(count)]
        parts = [inputs.ids, inputs.positions, inputs.slots, token_places, inputs.places, inputs.contexts,
                 inputs.starts, inputs.rows, inputs.row_places, inputs.ancestors]  # fmt: skip
        # Each part begins on 16 bytes: Triton compiles a kernel again for pointers that do not.
        padded = [part + [0] * (len(part) % 2) for part in parts]
        flat = self.to_device([number for part in padded for number in part])
        views = flat.split([len(part) for part in padded])
        return SentInputs(*(view[: len(part)] for view, part in zip(views, parts, strict=True)))

    def to_device(self, numbers: list[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int64)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def update_table(self, index: list[int], pages: list[int]) -> None:
        """Page numbers that the device lacks, at flat indexes."""
        if index:
            at, numbers = self.to_device(index + pages).chunk(2)
            self.page_table.view(-1)[at] = numbers.int()
