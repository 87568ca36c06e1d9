"""The 4-bit floats of MXFP4 and NVFP4: how values become codes, and which scale a block gets.

A code has a sign, two bits of exponent and one of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Blocks of
neighbouring inputs share a scale of 8 bits. MXFP4 has powers of two (E8M0: 2**(byte - 127)) for every 32 inputs, NVFP4
has small floats (E4M3) for every 16 and divides all of them by one number of the whole tensor.

The plain rule takes the scale that brings a block's largest magnitude to the largest code. Another one may suit the
others better, so each block is rounded with a few, and the smallest squared error wins. On the bundled model that takes
6 % (MXFP4, which has only its next power of two to try) and 25 % (NVFP4) off the squared error of the plain rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from quantkit.formats.base import quotient
from quantkit.formats.bits import pack, unpack
from quantkit.formats.codebook import CodebookWeight, DividedScales, table_of
from quantkit.formats.ct_float8 import LARGEST as LARGEST_SCALE
from quantkit.formats.ct_float8 import round_to_float8
from quantkit.formats.engine_rules import SGLANG_CT_MXFP4, TGI_CT, Refusal

KIND = "e2m1"  # of the table
MX_BLOCK, NV_BLOCK = 32, 16
LARGEST = 6.0
_REFUSED_BEFORE = (
    "4-bit floats with 16-bit activations were refused in August 2026; newer sources have kernels for them, not tried"
)
WEIGHTS_ALONE = (
    Refusal("SGLang", _REFUSED_BEFORE, SGLANG_CT_MXFP4, certain=False),
    Refusal("TGI", "no 4-bit floats of compressed-tensors", TGI_CT),
)
_TO_LARGEST = 3  # frexp's exponent of a magnitude, less this, brings it to between 4 and 8
_NV_TRIED = (LARGEST, 4.0, 4.5, 5.5, 6.5, 7.0)  # what a block's largest magnitude becomes; 5, 7.5 and 8 gain nothing
_BIAS, _NO_SCALE = 127, 255  # of E8M0; the byte 255 is no number


@cache
def power_table() -> Tensor:
    """The scale of every E8M0 byte; all of them are exact in bfloat16."""
    powers = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - _BIAS)
    powers[_NO_SCALE] = torch.nan
    return powers.to(torch.bfloat16)


@cache
def _bounds() -> Tensor:
    """Between the magnitudes of neighbouring codes. A value on a bound goes to the even code."""
    magnitudes = table_of(KIND)[:8]
    bounds = (magnitudes[:-1] + magnitudes[1:]) / 2
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(()))
    return bounds


def round_to_e2m1(values: Tensor) -> Tensor:
    """uint8 codes of float32 values; too large ones become the largest."""
    magnitudes = torch.bucketize(values.abs(), _bounds().to(values.device), out_int32=True).to(torch.uint8)
    return magnitudes | ((values < 0).to(torch.uint8) << 3)


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., n] -> uint8 [..., n / 2], the earlier one in the low half; 8 divides n."""
    return pack(codes, 4).view(torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`."""
    return unpack(packed.contiguous().view(torch.int32), 4, 2 * packed.shape[-1])


def quantize_mxfp4(weight: Tensor) -> CodebookWeight:
    """A weight [out, in], 32 divides in."""
    blocks = weight.float().reshape(-1, MX_BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = torch.frexp(largest).exponent.masked_fill(largest == 0, _TO_LARGEST) - _TO_LARGEST + _BIAS
    table = power_table().to(weight.device)
    tried = [table[(exponents + more).clamp(0, _NO_SCALE - 1)] for more in (0, 1)]
    codes, chosen = _fit(blocks, tried)
    return CodebookWeight(KIND, codes.flatten(), _take(tried, chosen), MX_BLOCK, (weight.shape[0], weight.shape[1]))


def quantize_nvfp4(weight: Tensor) -> CodebookWeight:
    """A weight [out, in], 16 divides in."""
    blocks = weight.float().reshape(-1, NV_BLOCK)
    largest = blocks.abs().amax(-1)
    divisor = _divisor(largest.amax())
    tried = [round_to_float8(quotient(largest, top) * divisor, torch.ones_like(largest)) for top in _NV_TRIED]
    codes, chosen = _fit(blocks, [DividedScales(values, divisor).decode() for values in tried])
    values = _take([values.view(torch.uint8) for values in tried], chosen).view(torch.float8_e4m3fn)
    scales = DividedScales(values, divisor)
    return CodebookWeight(KIND, codes.flatten(), scales, NV_BLOCK, (weight.shape[0], weight.shape[1]))


def _divisor(largest: Tensor) -> Tensor:
    """float32 [1]: brings the scale of a tensor's largest block to the largest E4M3; 1 where there is nothing."""
    divisor = LARGEST_SCALE * LARGEST / largest
    return torch.where(torch.isfinite(divisor), divisor, torch.ones_like(divisor)).view(1)


def _fit(blocks: Tensor, tried: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Codes [blocks, size], and which of the scales [blocks] costs each block the least squared error."""
    table = table_of(KIND).to(blocks.device)
    best, least = blocks.new_zeros(blocks.shape, dtype=torch.uint8), blocks.new_full(blocks.shape[:1], torch.inf)
    chosen = torch.zeros_like(least, dtype=torch.int64)
    for place, scales in enumerate(tried):
        steps = scales.float().unsqueeze(-1)
        codes = round_to_e2m1(blocks / steps.masked_fill(steps == 0, 1))
        loss = (table[codes.int()] * steps - blocks).square_().sum(-1)
        better = (loss < least) | (place == 0)  # squares of huge weights overflow: the plain rule holds
        best, least = torch.where(better.unsqueeze(-1), codes, best), torch.where(better, loss, least)
        chosen.masked_fill_(better, place)
    return best, chosen


def _take(tried: Sequence[Tensor], chosen: Tensor) -> Tensor:
    return torch.stack(list(tried)).gather(0, chosen.unsqueeze(0)).squeeze(0)
