"""The weights of a layer's experts as one: planes of equal shape and kind, behind each other in memory.

A plane is one linear of one expert. Down has a plane for each expert; gate and up have two, gate first, so that a
program finds both under the same rows. Memory is allocated once and filled plane by plane while a checkpoint is read.
Nothing here needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.grouped.routes import Routes
from quantkit.kernels.linear.weight import TICKETS
from quantkit.kernels.linear.weight_only import weight as weight_only
from quantkit.kernels.linear.weight_only.weight import Nested, PackedWeight


class GroupedWeight(Protocol):
    """All planes of gate and up, or of down."""

    @property
    def count(self) -> int:
        """Of planes."""

    @property
    def outputs(self) -> int:
        """Of one plane."""

    @property
    def inputs(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> str: ...

    def matmul(self, x: Tensor, routes: Routes, config: Any, activation: str | None = None) -> Tensor:
        """With an activation this is gate and up: x [tokens, inputs] -> [pairs, outputs] in the order of `routes`.
        Without one it is down: x [pairs, inputs] in that order -> [pairs, outputs], a pair under its number."""

    def in_half(self, dtype: torch.dtype) -> GroupedHalf:
        """Decoded, in memory of its own; itself where it is not quantized."""


@dataclass(frozen=True)
class GroupedHalf:
    """Planes that are not quantized."""

    values: Tensor  # bfloat16 or float16 [planes, outputs, inputs], contiguous
    tickets: Tensor  # int32, zero between calls

    @property
    def count(self) -> int:
        return self.values.shape[0]

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    @property
    def inputs(self) -> int:
        return self.values.shape[2]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return 2 * self.values.numel()

    @property
    def kind(self) -> str:
        return "bf16" if self.values.dtype == torch.bfloat16 else "fp16"

    def matmul(self, x: Tensor, routes: Routes, config: Any, activation: str | None = None) -> Tensor:
        from quantkit.kernels.linear.grouped.half import matmul  # needs Triton

        return matmul(x, self, routes, config, activation)

    def in_half(self, dtype: torch.dtype) -> GroupedHalf:
        return self


@dataclass(frozen=True)
class GroupedPacked:
    """Planes as `weight_only/weight.py` lays them out: each tensor of the first is the beginning of all planes' own."""

    planes: tuple[PackedWeight, ...]

    @property
    def count(self) -> int:
        return len(self.planes)

    @property
    def first(self) -> PackedWeight:
        return self.planes[0]

    @property
    def outputs(self) -> int:
        return self.first.outputs

    @property
    def inputs(self) -> int:
        return self.first.inputs

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def nbytes(self) -> int:
        return self.count * self.first.nbytes

    @property
    def kind(self) -> str:
        return self.first.kind

    def strides(self) -> tuple[int, int, int, int]:
        """Elements of a plane: of its words, its scales, its zero points, and its scales of the second level."""
        first, nested = self.first, self.first.nested
        stored = first.scales if nested is None else nested.codes
        assert stored is not None
        zeros = 0 if first.zeros is None else first.zeros.numel()
        return first.words.numel(), stored.numel(), zeros, 0 if nested is None else nested.scales.numel()

    def matmul(self, x: Tensor, routes: Routes, config: Any, activation: str | None = None) -> Tensor:
        from quantkit.kernels.linear.grouped.packed import matmul  # needs Triton

        return matmul(x, self, routes, config, activation)

    def in_half(self, dtype: torch.dtype) -> GroupedHalf:
        from quantkit.kernels.linear.grouped.decode import decode  # needs Triton

        return decode(self, dtype)


def why_not(formats: Iterable[Format | None], inputs: int) -> str | None:
    """Why no routed kernel takes planes in these formats (None: not quantized); None where one does."""
    found = set(formats)
    fmt = found.pop()
    if found:
        return "they are in different formats"
    if fmt is None:
        return None
    if eight_bit.takes(fmt):
        return f"{fmt.name} rounds activations too"
    return weight_only.why_not(fmt.quantize(torch.ones(1, inputs)))


def lay_out_half(values: Tensor) -> GroupedHalf:
    """Planes [planes, outputs, inputs] as they are."""
    return GroupedHalf(values, new_tickets(values.device))


def new_tickets(device: torch.device) -> Tensor:
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


class PackedStack:
    """Memory for planes of one kind, which is known from the first of them on."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._like: PackedWeight | None = None
        self._tensors: dict[str, Tensor] = {}

    def put(self, plane: int, weight: PackedWeight) -> None:
        """Copies a plane to its place. Zero points and act-order need not be everywhere: others get what means none."""
        if self._like is None:
            self._like = weight
        elif _kind(weight) != _kind(self._like) or not _same_table(weight, self._like):
            raise InputError(
                f"experts of one layer differ: one is {weight.kind} of {weight.outputs} x {weight.inputs}, others are "
                f"{self._like.kind} of {self._like.outputs} x {self._like.inputs}; use --device cpu"
            )
        parts = _parts(weight)
        for name in self._tensors.keys() | parts.keys():
            part = parts.get(name)
            if name not in self._tensors:
                assert part is not None
                self._tensors[name] = torch.empty(self._count, *part.shape, dtype=part.dtype, device=part.device)
                if name in _NEUTRAL:  # planes before had none
                    self._tensors[name][:] = _neutral(name, weight, part)
            place = self._tensors[name][plane]
            place.copy_(_neutral(name, weight, place) if part is None else part)

    def finish(self) -> GroupedPacked:
        assert self._like is not None
        like = replace(self._like, tickets=new_tickets(self._like.device))
        return GroupedPacked(tuple(_view(like, self._tensors, plane) for plane in range(self._count)))


_NEUTRAL = ("zeros", "order")


def _kind(weight: PackedWeight) -> tuple[object, ...]:
    """What planes must have in common."""
    scales = None if weight.scales is None else weight.scales.dtype
    every = None if weight.nested is None else weight.nested.every
    return weight.code_type, weight.outputs, weight.inputs, weight.group, weight.one_group, scales, every


def _same_table(weight: PackedWeight, other: PackedWeight) -> bool:
    if weight.nested is None or other.nested is None:
        return weight.nested is other.nested
    # by their bits: E4M3 has entries that are no numbers, equal to nothing
    return torch.equal(weight.nested.table.view(torch.int32), other.nested.table.view(torch.int32))


def _parts(weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors that planes have each for themselves."""
    parts = {name: getattr(weight, name) for name in ("words", "high", "scales", "zeros", "order")}
    if weight.nested is not None:
        parts |= {f"nested {name}": getattr(weight.nested, name) for name in ("codes", "scales", "offsets")}
    return {name: part for name, part in parts.items() if part is not None}


def _neutral(name: str, weight: PackedWeight, like: Tensor) -> Tensor:
    """Zero points in the middle, in all four bytes of a word; inputs in their own order."""
    if name == "order":
        return torch.arange(weight.inputs, dtype=like.dtype, device=like.device)
    return torch.full((4,), weight.middle, dtype=torch.uint8, device=like.device).view(torch.int32).expand_as(like)


def _view(like: PackedWeight, tensors: dict[str, Tensor], plane: int) -> PackedWeight:
    views = {name: tensor[plane] for name, tensor in tensors.items()}
    nested = like.nested
    if nested is not None:
        own = {name: views.pop(f"nested {name}") for name in ("codes", "scales", "offsets")}
        nested = Nested(table=nested.table, every=nested.every, **own)
    return replace(like, nested=nested, **views)  # type: ignore[arg-type]
