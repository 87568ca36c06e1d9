"""Blocks of GGUF files taken apart and put together, bit for bit: `pack(unpack(blocks, kind), kind)` is `blocks`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats.gguf.types import BlockType, Plane

_SIGNED = 128  # the zero of what files keep as signed bytes
_PAIR_BYTES = 12


@dataclass(frozen=True)
class Blocks:
    """What blocks [...] hold, one field a tensor, in the order of inputs. `types.py` says what they mean together."""

    codes: Tensor  # uint8 [..., size]
    scale: Tensor  # float16 [...]
    minimum: Tensor | None = None  # float16 [...], where the type has one
    scales: Tensor | None = None  # int8 [..., groups], where groups have small scales: what they mean, with a sign
    mins: Tensor | None = None  # int8 [..., groups], where groups have small minimums


def unpack(blocks: Tensor, kind: BlockType) -> Blocks:
    """uint8 [..., bytes of a block] -> what they hold."""
    if blocks.dtype != torch.uint8 or blocks.shape[-1] != kind.nbytes:
        raise InputError(
            f"blocks of {kind.name} are uint8 [..., {kind.nbytes}], "
            f"not {str(blocks.dtype)[6:]} [..., {blocks.shape[-1]}]"
        )
    codes = _gather(blocks, kind.codes, kind.size)
    if kind.zero == _SIGNED:
        codes = codes ^ _SIGNED
    minimum = None if kind.minimum_at is None else _half(blocks, kind.minimum_at)
    scales, mins = _small_numbers(blocks, kind)
    return Blocks(codes, _half(blocks, kind.scale_at), minimum, scales, mins)


def pack(held: Blocks, kind: BlockType) -> Tensor:
    """The inverse of `unpack`: uint8 [..., bytes of a block]. Codes and small numbers must fit their bits."""
    _check(held, kind)
    codes = held.codes ^ _SIGNED if kind.zero == _SIGNED else held.codes
    blocks = torch.zeros(*held.scale.shape, kind.nbytes, dtype=torch.uint8, device=codes.device)
    _scatter(blocks, kind.codes, codes)
    blocks[..., kind.scale_at : kind.scale_at + 2] = held.scale.unsqueeze(-1).view(torch.uint8)
    if kind.minimum_at is not None and held.minimum is not None:
        blocks[..., kind.minimum_at : kind.minimum_at + 2] = held.minimum.unsqueeze(-1).view(torch.uint8)
    if held.scales is None:
        return blocks
    if kind.pairs_at is not None and held.mins is not None:
        pairs = _pack_pairs(held.scales.to(torch.uint8), held.mins.to(torch.uint8))
        blocks[..., kind.pairs_at : kind.pairs_at + _PAIR_BYTES] = pairs
        return blocks
    small = held.scales if kind.scale_zero == _SIGNED else held.scales + kind.scale_zero
    small = small.contiguous().view(torch.uint8)
    _scatter(blocks, kind.scales, small if held.mins is None else torch.cat([small, held.mins.to(torch.uint8)], -1))
    return blocks


def _check(held: Blocks, kind: BlockType) -> None:
    """Every field that the type has, and no other, in the shape that belongs to it."""
    outer = held.scale.shape
    groups = (*outer, kind.groups)
    wanted = {
        "codes": (torch.uint8, (*outer, kind.size)),
        "scale": (torch.float16, outer),
        "minimum": (torch.float16, outer) if kind.has_mins else None,
        "scales": (torch.int8, groups) if kind.has_groups else None,
        "mins": (torch.int8, groups) if kind.has_groups and kind.has_mins else None,
    }
    for name, want in wanted.items():
        value: Tensor | None = getattr(held, name)
        found = None if value is None else (value.dtype, tuple(value.shape))
        if found != (None if want is None else (want[0], tuple(want[1]))):
            raise InputError(f"blocks of {kind.name}: {name} is {_spoken(found)}, but must be {_spoken(want)}")


def _spoken(field: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if field is None else f"{str(field[0])[6:]} {list(field[1])}"


def _small_numbers(blocks: Tensor, kind: BlockType) -> tuple[Tensor | None, Tensor | None]:
    if not kind.has_groups:
        return None, None
    if kind.pairs_at is not None:
        return _unpack_pairs(blocks[..., kind.pairs_at : kind.pairs_at + _PAIR_BYTES])
    small = _gather(blocks, kind.scales, kind.small_numbers)
    scales = small[..., : kind.groups]
    if kind.scale_zero == _SIGNED:
        signed = scales.contiguous().view(torch.int8)
    else:
        signed = scales.to(torch.int8) - kind.scale_zero
    return signed, small[..., kind.groups :].to(torch.int8) if kind.has_mins else None


def _gather(blocks: Tensor, planes: tuple[Plane, ...], count: int) -> Tensor:
    """uint8 [..., count]: the values of a field, with the bits of all its planes."""
    values: Tensor | None = None
    low = 0
    for plane in planes:
        runs = blocks[..., plane.start : plane.start + plane.nbytes(count)].unflatten(-1, (-1, plane.run))
        part = runs.new_empty(*runs.shape[:-1], 8 // plane.bits, plane.run)  # run, shift, byte
        for place in range(8 // plane.bits):
            torch.bitwise_right_shift(runs, place * plane.bits, out=part[..., place, :])
        if plane.bits < 8:
            part.bitwise_and_((1 << plane.bits) - 1)
        values = part.flatten(-3) if values is None else values.bitwise_or_(part.flatten(-3) << low)
        low += plane.bits
    assert values is not None
    return values


def _scatter(blocks: Tensor, planes: tuple[Plane, ...], values: Tensor) -> None:
    """Writes the values [..., count] of a field into its planes."""
    count, low = values.shape[-1], 0
    for plane in planes:
        part = (values >> low) & ((1 << plane.bits) - 1)
        shifted = part.unflatten(-1, (-1, 8 // plane.bits, plane.run))  # run, shift, byte
        runs = torch.zeros_like(shifted[..., 0, :])
        for place in range(8 // plane.bits):
            runs |= shifted[..., place, :] << (place * plane.bits)
        blocks[..., plane.start : plane.start + plane.nbytes(count)] = runs.flatten(-2)
        low += plane.bits


def _unpack_pairs(held: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 6 bits from 12 bytes. Bytes 0 to 3 hold the first four scales, 4 to 7 the
    first four minimums; 8 to 11 have four bits of the others, whose upper two are above those first ones."""
    first, upper = held[..., :8] & 63, (held[..., :8] >> 6) << 4
    others = torch.cat([held[..., 8:] & 15, held[..., 8:] >> 4], -1) | upper
    scales, mins = (torch.cat([first[..., part], others[..., part]], -1) for part in (slice(0, 4), slice(4, 8)))
    return scales.to(torch.int8), mins.to(torch.int8)


def _pack_pairs(scales: Tensor, mins: Tensor) -> Tensor:
    first = torch.cat([scales[..., :4], mins[..., :4]], -1)
    others = torch.cat([scales[..., 4:], mins[..., 4:]], -1)
    lower = (others[..., :4] & 15) | ((others[..., 4:] & 15) << 4)
    return torch.cat([first | ((others >> 4) << 6), lower], -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)
