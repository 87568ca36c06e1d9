"""The block as it was, beside the one that is quantized: what linears read in the model that is not quantized."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

from torch import Tensor

from quantkit.blocks import BlockPart
from quantkit.passes.activations import Activations
from quantkit.stages import Stage


class Twin:
    """A block that keeps its weights, and the hidden states before it, which become those after it.

    `inputs` are these hidden states once more: with them it can begin again.
    """

    def __init__(self, parts: tuple[BlockPart, ...], hidden: Activations, inputs: Activations | None = None) -> None:
        block = deepcopy(parts[0].block)
        self._parts = [TwinPart(replace(part, block=block), hidden) for part in parts]
        self._hidden, self._inputs = hidden, inputs

    def begin(self) -> list[TwinPart]:
        """Its parts, to be run one after the other."""
        for index, batch in enumerate(self._inputs or ()):
            self._hidden[index] = batch
        return self._parts


@dataclass
class TwinPart:
    """A part of it, and the hidden states before that part until it ran. `inner`: what its closing stage reads."""

    part: BlockPart
    hidden: Activations
    inner: Activations | None = None

    def inputs(self, stage: Stage) -> Iterator[Tensor]:
        """What the linears of a stage without experts read, batch by batch."""
        if self.inner is not None and stage == self.part.closing:
            yield from self.inner
            return
        for batch in self.hidden:
            (read,) = self.part.inputs(stage, batch)
            assert read is not None
            yield read

    def run(self) -> None:
        for index, batch in enumerate(self.hidden):
            inner = self.inner
            self.hidden[index] = self.part.run(batch) if inner is None else self.part.close(batch, inner[index])
        self.inner = None
