"""LLM.int8 layers as bitsandbytes stores them: one signed byte a weight, one scale a row.

    weight         int8 [out, in]      round(float16(W) * 127 / SCB)
    SCB            float32 [out]       largest magnitude of each row
    weight_format  uint8 scalar        0, the plain row layout

What makes it LLM.int8 happens at run time: activation columns with a value of 6.0 or more are multiplied in 16 bit,
the others are rounded to a signed byte per value and one scale per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import (
    DTYPES,
    Format,
    Index,
    InputRounding,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    check_choice,
    quotient,
)


@dataclass(frozen=True)
class AbsmaxInt8Weight(QuantizedWeight):
    """`weight = code * row_absmax / 127`."""

    codes: Tensor  # int8 [out, in]
    row_absmax: Tensor  # float32 [out]

    @property
    def shape(self) -> Shape:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.codes.float() * quotient(self.row_absmax, 127).unsqueeze(-1)).to(dtype)

    def cut(self, outputs: Index, inputs: Index) -> AbsmaxInt8Weight:
        return AbsmaxInt8Weight(self.codes[outputs][:, inputs].contiguous(), self.row_absmax[outputs])


@dataclass(frozen=True)
class LlmInt8(Format):
    """`threshold` is the activation magnitude from which a column counts as an outlier."""

    name: ClassVar[str] = "llm-int8"
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "SCB", "weight_format")
    dtype_follows_model: ClassVar[bool] = True

    threshold: float = 6.0
    dtype: str = "bfloat16"  # of the model; the scales are float32
    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("llm-int8: bits", self.bits, (8,))
        check_choice("llm-int8: dtype", self.dtype, tuple(DTYPES))
        if not self.threshold >= 0:  # NaN is not
            raise InputError(f"llm-int8: threshold is {self.threshold}, but must be 0 or more")

    def describe(self) -> str:
        return f"INT8 row, outliers >= {self.threshold:g}"

    @property
    def input_rounding(self) -> InputRounding:
        return InputRounding("int8", outlier_threshold=self.threshold)

    def served_inputs(self, inputs: Tensor, quantized: QuantizedWeight | None = None) -> Tensor:
        """In float16, as bitsandbytes: columns with an outlier in any token of the call stay, the rest is rounded.

        A row's scale covers the columns that are rounded, as in the paper (Dettmers et al., 2022). bitsandbytes lets it
        cover small values in outlier columns as well, which costs accuracy: KL 0.0186 against 0.0167 on SmolLM2-135M.
        """
        tokens = inputs.reshape(-1, inputs.shape[-1])  # [tokens, in]
        half = tokens.to(torch.float16).float()
        outliers = (half.abs() >= (self.threshold or float("inf"))).any(0)  # [in]; threshold 0: none
        row_absmax = half.masked_fill(outliers, 0).abs().amax(-1, keepdim=True)  # [tokens, 1]
        codes = torch.round(half * (127.0 / row_absmax.clamp(min=1e-30)))
        rounded = (codes * quotient(row_absmax, 127)).to(inputs.dtype)
        return torch.where(outliers, tokens, rounded).view(inputs.shape)

    def check(self, shape: Shape) -> None:
        """Any shape will do."""

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        return {
            "weight": PartSpec(torch.int8, shape),
            "SCB": PartSpec(torch.float32, (shape[0],)),
            "weight_format": PartSpec(torch.uint8, ()),
        }

    def quantize(self, weight: Tensor) -> AbsmaxInt8Weight:
        half = weight.to(torch.float16).float()  # bitsandbytes sees the weight in float16
        row_absmax = half.abs().amax(-1)
        if not bool(torch.isfinite(row_absmax).all()):
            raise InputError("weights beyond 65504 do not fit LLM.int8, which works in float16; use another format")
        codes = torch.round(half * (127.0 / row_absmax.clamp(min=1e-30)).unsqueeze(-1)).to(torch.int8)
        return AbsmaxInt8Weight(codes, row_absmax)

    def pack(self, quantized: QuantizedWeight) -> Parts:
        if not isinstance(quantized, AbsmaxInt8Weight):
            raise CannotHold("llm-int8 stores signed bytes scaled by the largest magnitude of their row only")
        return {
            "weight": quantized.codes,
            "SCB": quantized.row_absmax,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def unpack(self, parts: Mapping[str, Tensor]) -> AbsmaxInt8Weight:
        if "weight_format" in parts and int(parts["weight_format"]) != 0:
            raise ValueError(f"weight_format is {int(parts['weight_format'])}, a layout for one kind of GPU; 0 is read")
        return AbsmaxInt8Weight(parts["weight"], parts["SCB"].float())

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        narrowed = {"weight": parts["weight"][outputs, inputs], "SCB": parts["SCB"][outputs]}
        return Narrowed(dict(parts) | narrowed, outputs, inputs)

    def needs_all_inputs(self, share: int) -> bool:
        """A token's scale covers all its inputs."""
        return True
