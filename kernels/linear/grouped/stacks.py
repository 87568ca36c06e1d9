"""Memory for the planes of a layer's experts: allocated once, and filled plane by plane while a checkpoint is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, GgufWeight, QuantizedWeight
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.grouped.weight import GroupedEightBit, GroupedPacked, GroupedWeight, new_tickets
from quantkit.kernels.linear.weight import LinearWeight
from quantkit.kernels.linear.weight_only import gguf
from quantkit.kernels.linear.weight_only import weight as weight_only
from quantkit.kernels.linear.weight_only.weight import Nested, PackedWeight


class Stack(Protocol):
    """Memory for planes of one kind, which is known from the first of them on."""

    def put(self, plane: int, weight: Any) -> None:
        """Copies a plane, laid out as `lay_out` does, to its place."""

    def finish(self, bias: Tensor | None = None) -> GroupedWeight:
        """The planes as one, with the biases [planes, outputs] of all."""


def stack_of(fmt: Format, count: int) -> Stack:
    """For so many planes in a format."""
    return EightBitStack(count) if eight_bit.takes(fmt) else PackedStack(count)


def lay_out(fmt: Format, quantized: QuantizedWeight) -> PackedWeight | EightBitWeight:
    """One plane as a stack of its format takes it."""
    if isinstance(quantized, GgufWeight):
        return gguf.lay_out_packed(quantized)
    return eight_bit.lay_out(fmt, quantized) if eight_bit.takes(fmt) else weight_only.lay_out(quantized)


class EightBitStack:
    """Of LLM.int8, W8A8 and FP8."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._like: EightBitWeight | None = None
        self._tensors: dict[str, Tensor] = {}

    def put(self, plane: int, weight: EightBitWeight) -> None:
        parts = {"values": weight.values, "scales": weight.scales, "input_scales": weight.input_scale}
        if self._like is None:
            self._like = weight
            for name, part in parts.items():
                if part is not None:
                    self._tensors[name] = torch.empty(self._count, *part.shape, dtype=part.dtype, device=part.device)
        elif (weight.kind, weight.outputs, weight.inputs) != (self._like.kind, self._like.outputs, self._like.inputs):
            raise _they_differ(weight, self._like)
        for name, stored in self._tensors.items():
            part = parts[name]
            assert part is not None
            stored[plane].copy_(part)

    def finish(self, bias: Tensor | None = None) -> GroupedEightBit:
        assert self._like is not None
        values, scales, inputs = (self._tensors.get(name) for name in ("values", "scales", "input_scales"))
        assert values is not None
        assert scales is not None
        first = replace(
            self._like,
            values=values[0],
            scales=scales[0],
            input_scale=None if inputs is None else inputs[0],
            tickets=new_tickets(values.device),
        )
        return GroupedEightBit(first, values, scales, None if inputs is None else inputs.flatten(), bias)


class PackedStack:
    """Of weight-only formats."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._like: PackedWeight | None = None
        self._tensors: dict[str, Tensor] = {}

    def put(self, plane: int, weight: PackedWeight) -> None:
        """Copies a plane to its place. Zero points and act-order need not be everywhere: others get what means none."""
        if self._like is None:
            self._like = weight
        elif _kind(weight) != _kind(self._like) or not _same_table(weight, self._like):
            raise _they_differ(weight, self._like)
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
        assert self._like is not None
        like = replace(self._like, tickets=new_tickets(self._like.device))
        return GroupedPacked(tuple(_view(like, self._tensors, plane) for plane in range(self._count)), bias)


def _they_differ(weight: LinearWeight, other: LinearWeight) -> InputError:
    return InputError(
        f"experts of one layer differ: one is {weight.kind} of {weight.outputs} x {weight.inputs}, others are "
        f"{other.kind} of {other.outputs} x {other.inputs}; use --device cpu"
    )


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
