"""Dense little-endian bit streams: the one packing rule that GPTQ and compressed-tensors share.

Value k of a stream starts at bit `k * bits`, least significant bit first, in consecutive int32 words. For widths that
divide 32 no value straddles two words; for the others 32 values fill exactly `bits` words, and some straddle.
Everything here works on the last dimension, for any width from 1 to 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # values that fill a whole number of words (`bits` of them) at any width


def packed_width(count: int, bits: int) -> int:
    """How many int32 words `count` values take."""
    return -(-count * bits // 32)


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] with values below 2**bits -> int32 [..., packed_width(n)]; the last word is padded with zeros."""
    count = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -count % BLOCK))
    if 8 % bits == 0:
        return _pack_bytes(padded, bits)[..., : packed_width(count, bits)].contiguous()
    blocks = padded.unflatten(-1, (-1, BLOCK))
    words = torch.zeros(*blocks.shape[:-1], bits, dtype=torch.int32, device=values.device)
    for k in range(BLOCK):
        word, shift = divmod(k * bits, 32)
        value = blocks[..., k].to(torch.int32)
        words[..., word] |= value << shift
        if shift + bits > 32:
            words[..., word + 1] |= value >> (32 - shift)
    return words.flatten(-2)[..., : packed_width(count, bits)].contiguous()


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [..., w] -> uint8 [..., count]: the inverse of `pack`."""
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        return _unpack_bytes(words, bits)[..., :count].contiguous()
    padded = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    blocks = padded.unflatten(-1, (-1, bits))
    values = torch.empty(*blocks.shape[:-1], BLOCK, dtype=torch.uint8, device=words.device)
    for k in range(BLOCK):
        word, shift = divmod(k * bits, 32)
        value = (blocks[..., word] >> shift) & mask
        if shift + bits > 32:
            low_bits = 32 - shift
            value = (value & ((1 << low_bits) - 1)) | ((blocks[..., word + 1] << low_bits) & mask)
        values[..., k] = value.to(torch.uint8)
    return values.flatten(-2)[..., :count].contiguous()


def _pack_bytes(values: Tensor, bits: int) -> Tensor:
    """The same for widths with whole values in a byte: the bytes of a word are in the order of the stream."""
    each = 8 // bits
    packed = values[..., ::each].clone(memory_format=torch.contiguous_format)
    for k in range(1, each):
        packed |= values[..., k::each] << (k * bits)
    return packed.view(torch.int32)


def _unpack_bytes(words: Tensor, bits: int) -> Tensor:
    # `contiguous` would leave a single column as it is, whatever lies between its words.
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)
