"""Packed weights whose products with many tokens are made in FP8; those with few tokens stay in 16 bits.

Few tokens wait for the weight, and 4 bits are read fastest. Many tokens wait for the multiplication, which float8 does
at twice the rate: then the weight is decoded to float8 in each step, or a copy of it in float8 is there from the
start, and the kernels of FP8 weights (`eight_bit/`) do the rest, each token rounded with a scale of its own. Where it
was measured to be faster, codes are multiplied as they are (`float8_codes.py`), and only tokens are rounded.

Layout   a weight as in `weight.py`, a float32 scale for every row, perhaps the copy
Meaning  for few tokens that of the packed weight; for many `arithmetic.meaning_of_many`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit.formats import QuantizedWeight
from quantkit.formats.float8_rows import row_scales
from quantkit.kernels.card import Card
from quantkit.kernels.linear.dispatch import BUCKETS, bucket_of, choose
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.weight import Choice, Kernel, LinearWeight, by_name
from quantkit.kernels.linear.weight_only.weight import PackedWeight

_MOST_AT_ONCE = 2  # bytes: decoded to float8, and read again
_FEWEST_OF_CODES = 64  # tokens; fewer wait for the weight in any arithmetic


@dataclass(frozen=True)
class Float8Steps:
    packed: PackedWeight
    row_scales: Tensor  # float32 [rows], 1 where padded
    copy: EightBitWeight | None  # None: decoded in every step that needs it

    @property
    def outputs(self) -> int:
        return self.packed.outputs

    @property
    def inputs(self) -> int:
        return self.packed.inputs

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.row_scales.nbytes + self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """Of what is there twice: no step reads both."""
        return 0 if self.copy is None else self.copy.values.nbytes

    @property
    def kind(self) -> str:
        return f"{self.packed.kind}-fp8" + ("" if self.copy is None else "-copy")

    @property
    def relatives(self) -> tuple[str, ...]:
        """None: the packed weight and the one in float8 ask for their own measurements."""
        return ()

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS

    @property
    def output_unit(self) -> int:
        return self.packed.output_unit

    @property
    def token_dtype(self) -> torch.dtype:
        return self.packed.token_dtype

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return _kernels()

    def bucket(self, tokens: int) -> int | None:
        return bucket_of(tokens)

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        fewest = self.fewest_tokens(card)
        if tokens < fewest:
            return Choice(PACKED.name, None, f"fewer than {fewest} tokens gain nothing from FP8, as is estimated")
        return Choice(FLOAT8.name, None, f"{fewest} tokens and more gain from FP8, as is estimated")

    def fewest_tokens(self, card: Card) -> int:
        """From which FP8 is faster: twice the rate has to pay for the bytes that move beside those of the codes."""
        from quantkit.kernels.linear.cost import fewest_tokens_for_bytes  # needs Triton

        codes = self.packed.nbytes / (self.packed.rows * self.packed.chunks * 128)
        more = 1 - codes if self.copy is not None else _MOST_AT_ONCE
        return fewest_tokens_for_bytes(more, card)

    def candidates(self, tokens: int) -> Iterator[Choice]:
        yield Choice(PACKED.name, None, "")
        yield Choice(FLOAT8.name, None, "")
        if tokens >= _FEWEST_OF_CODES and self.kernels[CODES].supports(self, self.token_dtype):
            from quantkit.kernels.linear.splits import splits_to_try  # needs Triton
            from quantkit.kernels.linear.weight_only.float8_codes import TRIED

            for config in TRIED:
                for splits in splits_to_try(self.outputs, config.outputs, tokens, config.tokens, self.packed.chunks):
                    yield Choice(CODES, replace(config, splits=splits), "")

    def rounds_itself(self, tokens: int, dtype: torch.dtype) -> bool:
        """Whether weights are rounded to float8, too, for so many tokens."""
        return choose(self, tokens, dtype=dtype).kernel == FLOAT8.name

    def join(self, others: Sequence[LinearWeight]) -> Float8Steps | None:
        alike = [weight for weight in others if isinstance(weight, Float8Steps)]
        packed = self.packed.join([weight.packed for weight in alike]) if len(alike) == len(others) else None
        if packed is None:
            return None
        copies = [weight.copy for weight in alike if weight.copy is not None]
        copy = None if self.copy is None else self.copy.join(copies)
        return Float8Steps(packed, torch.cat([self.row_scales, *(weight.row_scales for weight in alike)]), copy)

    def in_float8(self) -> EightBitWeight:
        """The weight as kernels of FP8 take it, its columns in the order of the packed one."""
        return self.copy or _decoded(self.packed, self.row_scales)


def lay_out(packed: PackedWeight, quantized: QuantizedWeight, *, copied: bool) -> Float8Steps:
    """`quantized` is what was packed."""
    scales = torch.nn.functional.pad(row_scales(quantized), (0, packed.rows - packed.outputs), value=1.0)
    return Float8Steps(packed, scales, _decoded(packed, scales) if copied else None)


def _decoded(packed: PackedWeight, scales: Tensor) -> EightBitWeight:
    from quantkit.kernels.linear.weight_only.dequantize import to_float8_rows  # needs Triton

    return EightBitWeight(
        outputs=packed.outputs,
        inputs=packed.inputs,
        values=to_float8_rows(packed, scales),
        scales=scales,
        activations="token",
        threshold=math.inf,
        input_scale=None,
        tickets=packed.tickets,
    )


def _in_16_bits(x: Tensor, weight: Float8Steps, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    return _run(x, weight.packed, bias, out)


def _in_float8(x: Tensor, weight: Float8Steps, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    order = weight.packed.order
    return _run(x if order is None else x.index_select(1, order), weight.in_float8(), bias, out)


def _run(x: Tensor, weight: PackedWeight | EightBitWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    choice = choose(weight, x.shape[0] if x.ndim == 2 else 0, dtype=x.dtype)
    return weight.kernels[choice.kernel].run(x, weight, choice.config, bias, out)


PACKED = Kernel("packed", _in_16_bits)
FLOAT8 = Kernel("float8", _in_float8)
CODES = "codes"


@cache
def _kernels() -> Mapping[str, Kernel]:
    from quantkit.kernels.linear.weight_only import float8_codes  # needs Triton

    def by_codes(x: Tensor, weight: Float8Steps, config: Any, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return float8_codes.matmul(x, weight.packed, config, bias=bias, out=out)

    def supports(weight: Float8Steps, dtype: torch.dtype) -> bool:
        return float8_codes.supports(weight.packed)

    return by_name(PACKED, FLOAT8, Kernel(CODES, by_codes, float8_codes.CodesConfig, supports))
