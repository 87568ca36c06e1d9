"""Experts that files keep in one tensor: which part of it belongs to which linear, as data.

    stored                        of each expert
    <name>         [e, in, out]   `weight` [out, in]
    <name>_bias    [e, out]       `bias` [out]
    <name>_blocks  [e, out, ...]  `blocks` [out, ...]: the two parts of MXFP4
    <name>_scales  [e, out, ...]  `scales` [out, ...]

Where a tensor holds several linears, their rows alternate. A checkpoint presents the parts under the names on the
right, so that whoever quantizes, inspects or runs a model sees linears as everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.stages import Group

_PARTS = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}


@dataclass(frozen=True)
class Slice:
    """One expert of a stored tensor: all of its rows, or every `step`-th of them."""

    stored: str  # name of the tensor
    expert: int
    first: int
    step: int
    transposed: bool

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        inner = tuple(reversed(whole[1:])) if self.transposed else whole[1:]
        return (len(range(self.first, inner[0], self.step)), *inner[1:])

    def take(self, whole: Any) -> Any:
        """A view of the tensor."""
        inner = whole[self.expert]
        return (inner.T if self.transposed else inner)[self.first :: self.step]


@dataclass(frozen=True)
class Fused:
    """Linears of all experts in one tensor; `{}` stands for an expert's number."""

    stored: str
    linears: Group

    def slices(self, name: str, experts: int) -> Iterator[tuple[str, Slice]]:
        """The name of every part of a tensor of this name, and where it lies; none where the tensor is another."""
        for ending, part in _PARTS.items():
            block, found, rest = name.rpartition(f".{self.stored}{ending}")
            if not found or rest:
                continue
            for expert in range(experts):
                for place, linear in enumerate(self.linears):
                    where = Slice(name, expert, place, len(self.linears), transposed=part == "weight")
                    yield f"{block}.{linear.format(expert)}.{part}", where
