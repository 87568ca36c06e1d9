"""What the device keeps of running sequences, one row each: the page table, the last token sampled, and guesses.

The row behind the last one belongs to nobody: padding reads and writes it. Its pages are many enough for the longest
padding, however short contexts are.
"""

from __future__ import annotations

from array import array
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.core.step_plan import FROM_ROW, MOST_GUESSES
from quantkit.runtime.device.step_inputs import StepInputs, in_one
from quantkit.runtime.model.tensor_group import Group, OneRank

LONGEST_PADDING = 1024  # tokens of a step that nobody asked for: what fills up a graph of prompts


@dataclass(frozen=True)
class SentInputs:
    """`StepInputs` as int64 tensors on the device, and the device row of every token."""

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    token_rows: Tensor
    rows: Tensor
    contexts: Tensor
    starts: Tensor
    logits_rows: Tensor
    owner_rows: Tensor
    ancestors: Tensor


class DeviceRows:
    def __init__(
        self,
        num_rows: int,
        max_context: int,
        page_size: int,
        device: torch.device,
        group: Group = OneRank(),  # noqa: B008  (has no state)
    ) -> None:
        """Of a `group` of ranks that all have such rows, the first one's tokens count."""
        self.num_rows = num_rows
        self.max_context = max_context
        self.device = device
        self._group = group
        shape = (num_rows + 1, 1 + MOST_GUESSES)  # the last token, guesses
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        shape = (num_rows + 1, -(-max(max_context, LONGEST_PADDING) // page_size))
        self.page_table = torch.full(shape, PADDING_PAGE, dtype=torch.int32, device=device)

    def alone(self) -> DeviceRows:
        """The same rows for a model that this rank runs alone, as a draft: no other rank is asked for tokens."""
        rows = copy(self)
        rows._group = OneRank()
        return rows

    @property
    def padding(self) -> int:
        return self.num_rows

    def resolve(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Token ids, of which negative ones say where on the device the token is (`core/step_plan.py`)."""
        return self._group.broadcast(torch.where(ids < 0, self.tokens[rows, (FROM_ROW - ids).clamp(min=0)], ids))

    def send(self, inputs: StepInputs) -> SentInputs:
        """All numbers of a step in one copy."""
        parts = [inputs.ids, inputs.positions, inputs.kv_slots, inputs.token_rows, inputs.rows, inputs.contexts,
                 inputs.starts, inputs.logits_rows, inputs.owner_rows, inputs.ancestors]  # fmt: skip
        views = self.to_device(in_one(parts)).split([len(part) + len(part) % 2 for part in parts])
        return SentInputs(*(view[: len(part)] for view, part in zip(views, parts, strict=True)))

    def to_device(self, numbers: list[int]) -> Tensor:
        # An array first: torch takes three times as long to read a list. It makes no tensor of an empty one.
        host = torch.frombuffer(array("q", numbers or [0]), dtype=torch.int64)[: len(numbers)]
        return (host.pin_memory() if self.device.type == "cuda" else host).to(self.device, non_blocking=True)

    def update_table(self, index: list[int], pages: list[int]) -> None:
        """Page numbers that the device lacks, at flat indexes."""
        if index:
            at, numbers = self.to_device(index + pages).chunk(2)
            self.page_table.view(-1)[at] = numbers.int()
