"""Memory for the planes of a layer's experts: allocated once, and filled plane by plane while a checkpoint is read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.linear.grouped.weight import GroupedPacked, new_tickets
from quantkit.kernels.linear.weight_only.weight import Nested, PackedWeight


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

    def finish(self, bias: Tensor | None = None) -> GroupedPacked:
        """The planes as one, with the biases [planes, outputs] of all."""
        assert self._like is not None
        like = replace(self._like, tickets=new_tickets(self._like.device))
        return GroupedPacked(tuple(_view(like, self._tensors, plane) for plane in range(self._count)), bias)


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
