"""The weights of a layer's experts as one: planes of equal shape and kind, behind each other in memory.

A plane is one linear of one expert. Down has a plane for each expert; gate and up have two, gate first, so that a
program finds both under the same rows. Experts that have biases have them in all planes. Nothing here needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.formats import Format, GgufWeight
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.grouped.routes import Routes
from quantkit.kernels.linear.weight import TICKETS
from quantkit.kernels.linear.weight_only import gguf
from quantkit.kernels.linear.weight_only import weight as weight_only
from quantkit.kernels.linear.weight_only.weight import PackedWeight

Clip = tuple[float, float]  # limit and factor of a clipped SiLU, as `reference.elementwise.gated_activation` has them


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

    @property
    def bias(self) -> Tensor | None:
        """[planes, outputs] in the dtype of x."""

    @property
    def tickets(self) -> Tensor: ...

    def matmul(
        self, x: Tensor, routes: Routes, config: Any, activation: str | None = None, clip: Clip | None = None
    ) -> Tensor:
        """With an activation this is gate and up: x [tokens, inputs] -> [pairs, outputs] in the order of `routes`.
        Without one it is down: x [pairs, inputs] in that order -> [pairs, outputs], a pair under its number."""

    def in_half(self, dtype: torch.dtype) -> GroupedWeight:
        """Decoded, in memory of its own; itself where products read it as it is, however many pairs there are."""


@dataclass(frozen=True)
class GroupedHalf:
    """Planes that are not quantized."""

    values: Tensor  # bfloat16 or float16 [planes, outputs, inputs], contiguous
    tickets: Tensor  # int32, zero between calls
    bias: Tensor | None = None

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
        return 2 * self.values.numel() + bytes_of_bias(self)

    @property
    def kind(self) -> str:
        return "bf16" if self.values.dtype == torch.bfloat16 else "fp16"

    def matmul(
        self, x: Tensor, routes: Routes, config: Any, activation: str | None = None, clip: Clip | None = None
    ) -> Tensor:
        from quantkit.kernels.linear.grouped.half import matmul  # needs Triton

        return matmul(x, self, routes, config, activation, clip)

    def in_half(self, dtype: torch.dtype) -> GroupedHalf:
        return self


@dataclass(frozen=True)
class GroupedPacked:
    """Planes as `weight_only/weight.py` lays them out: each tensor of the first is the beginning of all planes' own."""

    planes: tuple[PackedWeight, ...]
    bias: Tensor | None = None

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
        return self.count * self.first.nbytes + bytes_of_bias(self)

    @property
    def kind(self) -> str:
        return self.first.kind

    @property
    def tickets(self) -> Tensor:
        return self.first.tickets

    def strides(self) -> tuple[int, int, int, int]:
        """Elements of a plane: of its words, its scales, its zero points, and its scales of the second level."""
        first, nested = self.first, self.first.nested
        stored = first.scales if nested is None else nested.codes
        assert stored is not None
        zeros = 0 if first.zeros is None else first.zeros.numel()
        return first.words.numel(), stored.numel(), zeros, 0 if nested is None else nested.scales.numel()

    def matmul(
        self, x: Tensor, routes: Routes, config: Any, activation: str | None = None, clip: Clip | None = None
    ) -> Tensor:
        from quantkit.kernels.linear.grouped.packed import matmul  # needs Triton

        return matmul(x, self, routes, config, activation, clip)

    def in_half(self, dtype: torch.dtype) -> GroupedHalf:
        from quantkit.kernels.linear.grouped.decode import decode  # needs Triton

        return decode(self, dtype)


@dataclass(frozen=True)
class GroupedEightBit:
    """Planes as `eight_bit/weight.py` lays them out, behind each other; activations are what that file says."""

    first: EightBitWeight  # the first plane, with views of what follows
    values: Tensor  # int8 or float8_e4m3 [planes, rows, columns]
    scales: Tensor  # float32 [planes, rows], or [planes, rows / 128, columns / 128]
    input_scales: Tensor | None  # float32 [planes], only static
    bias: Tensor | None = None

    @property
    def count(self) -> int:
        return self.values.shape[0]

    @property
    def outputs(self) -> int:
        return self.first.outputs

    @property
    def inputs(self) -> int:
        return self.first.inputs

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + bytes_of_bias(self)

    @property
    def kind(self) -> str:
        return self.first.kind

    @property
    def tickets(self) -> Tensor:
        return self.first.tickets

    def matmul(
        self, x: Tensor, routes: Routes, config: Any, activation: str | None = None, clip: Clip | None = None
    ) -> Tensor:
        from quantkit.kernels.linear.grouped.eight_bit import matmul  # needs Triton

        return matmul(x, self, routes, config, activation, clip)

    def in_half(self, dtype: torch.dtype) -> GroupedEightBit:
        return self


def why_not(formats: Iterable[Format | None], inputs: int) -> str | None:
    """Why no routed kernel takes planes in these formats (None: not quantized); None where one does."""
    found = set(formats)
    fmt = found.pop()
    if found:
        return "they are in different formats"
    if fmt is None or eight_bit.takes(fmt):
        return None
    row = fmt.example((1, inputs))
    return gguf.why_not_packed(row) if isinstance(row, GgufWeight) else weight_only.why_not(row)


def lay_out_half(values: Tensor, bias: Tensor | None = None) -> GroupedHalf:
    """Planes [planes, outputs, inputs] as they are."""
    return GroupedHalf(values, new_tickets(values.device), bias)


def new_tickets(device: torch.device) -> Tensor:
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def bytes_of_bias(weight: GroupedWeight) -> int:
    return 0 if weight.bias is None else weight.bias.nbytes
