"""The weight-only kernels, which of them runs where nothing was measured, and what is worth a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from quantkit.kernels.card import NO_GPU, Card, card_of
from quantkit.kernels.linear.cost import ESTIMATED, Product, cheapest
from quantkit.kernels.linear.dispatch import bucket_of
from quantkit.kernels.linear.splits import splits_to_try
from quantkit.kernels.linear.weight import CHUNK, Choice, by_name, unmeasured
from quantkit.kernels.linear.weight_only import dequantize, hopper, skinny
from quantkit.kernels.linear.weight_only.hopper import HopperConfig
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig
from quantkit.kernels.linear.weight_only.weight import MANY_TOKENS, PackedWeight

KERNELS = by_name(skinny.KERNEL, hopper.KERNEL, dequantize.KERNEL)

# Most tokens -> tiles that the sweep on an H200 favoured (docs/explanations/kernels.md).
_SKINNY = {
    8: (SkinnyConfig(32, 8, 2, 3), SkinnyConfig(64, 8, 4, 3)),
    16: (SkinnyConfig(64, 16, 4, 3),),
    32: (SkinnyConfig(64, 32, 4, 3),),
    64: (SkinnyConfig(64, 64, 4, 3),),
    128: (SkinnyConfig(64, 128, 4, 3),),
    256: (SkinnyConfig(64, 128, 4, 3),),
}
# The same for weights with a table of values, where a multiprocessor has room for tables of pairs (`assembly.py`).
_PAIRS = {
    8: (SkinnyConfig(128, 8, 4, 3, copies=32), SkinnyConfig(64, 8, 4, 3, copies=32)),
    16: (SkinnyConfig(128, 16, 4, 3, copies=32), SkinnyConfig(64, 16, 4, 3, copies=32)),
    32: (SkinnyConfig(128, 32, 4, 3, copies=32), SkinnyConfig(64, 32, 4, 3, copies=32)),
    64: (SkinnyConfig(128, 64, 8, 3, copies=32),),
}
_PAIR_TABLE = 32 << 10  # bytes
_ROOM_FOR_PAIRS = 160 << 10  # bytes of shared memory
_LARGEST_IN_REGISTERS = 64  # tokens of a tile: 64 x 128 spill where a warp holds its operands itself, or many scales
_LARGEST_OF_FINE_PAIRS = 32  # tokens of a tile: 128 x 64 spill beside a table of pairs and many scales
# Hopper's kernel, chunks of a multiprocessor from which it pays to share tiles, and wide tiles: see
# docs/explanations/kernels.md.
_FEWEST_CHUNKS = {64: 2, 128: 6}
_WIDE_FROM = {64: 12, 128: 15}
_FEWEST_OF_A_PART = 4  # chunks
_FEWEST_OF_3_BITS = 16  # tokens of a tile (H200, gate_up, one token: 32 us with 16, 43 with 8)

# Most tokens -> (outputs, tokens, warps, stages, scale first)
_SKINNY_TRIED: dict[int, list[tuple[int, int, int, int, bool]]] = {
    8: [(32, 8, 2, 3, False), (64, 8, 4, 3, False), (64, 8, 2, 3, False), (128, 8, 4, 3, False), (32, 8, 1, 3, False),
        (64, 8, 1, 3, False), (32, 16, 2, 3, False), (64, 16, 4, 3, False)],
    16: [(32, 16, 2, 3, False), (64, 16, 4, 3, False), (64, 16, 2, 3, False), (128, 16, 4, 3, False)],
    32: [(64, 32, 4, 3, False), (128, 32, 4, 3, False), (32, 32, 2, 3, False), (64, 16, 4, 3, False)],
    64: [(64, 64, 4, 3, False), (128, 64, 8, 3, False), (64, 32, 4, 3, False), (128, 32, 4, 3, False)],
    128: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (64, 64, 4, 3, False), (128, 64, 8, 3, False)],
    256: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (64, 64, 4, 3, False), (128, 64, 8, 3, False),
          (128, 256, 8, 2, True)],
    512: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (128, 64, 8, 3, False), (128, 256, 8, 2, True)],
    1024: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (128, 256, 8, 2, True)],
}  # fmt: skip
# The same for weights with a table of values, through a table of pairs: (outputs, tokens, warps, stages)
_PAIRS_TRIED: dict[int, list[tuple[int, int, int, int]]] = {
    8: [(64, 8, 4, 3), (128, 8, 4, 3), (128, 8, 8, 3), (256, 8, 8, 3)],
    16: [(64, 16, 4, 3), (128, 16, 4, 3), (256, 16, 8, 3)],
    32: [(64, 32, 4, 3), (128, 32, 4, 3), (128, 32, 8, 3)],
    64: [(64, 64, 4, 3), (128, 64, 8, 3)],
}
_HOPPER_TRIED = (
    HopperConfig(256, 3),
    HopperConfig(256, 3, 0),
    HopperConfig(256, 3, 2),
    HopperConfig(256, 3, 4),
    HopperConfig(128, 4),
    HopperConfig(128, 4, 0),
    HopperConfig(128, 4, 2),
    HopperConfig(128, 4, 4),
    HopperConfig(128, 4, 1, 192),
    HopperConfig(128, 4, 0, 192),
    HopperConfig(64, 6, 0),
    HopperConfig(64, 6, 0, 192),
)


def default(weight: PackedWeight, tokens: int, card: Card) -> Choice:
    """Tiles that the sweep favoured, cut as `cost.py` expects it to be fastest."""
    if tokens >= MANY_TOKENS:
        return Choice("dequantize", None, f"{MANY_TOKENS} tokens and more always pay for decoding once")
    why, most = unmeasured(weight), bucket_of(tokens)
    if most >= 64 and card.has_warpgroups:
        cut = _hopper_cut(weight, most, card.processors)
        if cut is not None:
            return Choice("hopper", cut[0], f"{why}; {cut[1]}")
    if most not in _SKINNY:
        return Choice("dequantize", None, f"{why}; many tokens pay for decoding once")
    large = most
    if (card is not NO_GPU and not card.multiplies_from_shared) or _has_fine_scales(weight):
        large = min(large, _LARGEST_IN_REGISTERS)
    if weight.code_type == "int3":
        large = max(large, _FEWEST_OF_3_BITS)
    crowded = large > _LARGEST_OF_FINE_PAIRS and _has_fine_scales(weight)
    pairs = large in _PAIRS and has_room_for_pairs(weight, card) and not crowded
    inputs = weight.chunks * CHUNK
    product = Product(
        weight.outputs, inputs, most, weight.nbytes / (weight.rows * inputs), table=_PAIR_TABLE if pairs else 0
    )
    return Choice("skinny", cheapest(product, (_PAIRS if pairs else _SKINNY)[large], card), f"{why}; {ESTIMATED}")


def _hopper_cut(weight: PackedWeight, most: int, processors: int) -> tuple[HopperConfig, str] | None:
    """How to cut a product for Hopper's kernel, and why so; None where the other one is faster."""

    def tiles(config: HopperConfig) -> int:
        return -(-weight.outputs // config.outputs) * -(-most // config.tokens)

    def share(config: HopperConfig) -> float:
        """Chunks of a multiprocessor."""
        return tiles(config) * weight.chunks / processors

    large, small = HopperConfig(), HopperConfig(tokens=128, stages=4, splits=0)
    if most >= large.tokens and tiles(large) >= 0.75 * processors:
        return large, "tiles enough for every multiprocessor"
    if most == 64:
        if weight.code_type == "int8":
            return None
        small = HopperConfig(tokens=64, stages=6, splits=0)
    wide = replace(small, outputs=192)
    few = replace(small, splits=min(processors // tiles(small), weight.chunks // _FEWEST_OF_A_PART))
    if most == 128 and few.splits >= 4:
        return few, f"{few.splits} programs for each of few tiles"
    if share(wide) >= _WIDE_FROM.get(most, math.inf) and not _spills(weight, wide):
        return wide, "equal shares of wide tiles for every multiprocessor"
    if share(small) >= _FEWEST_CHUNKS.get(most, 6) and (most, weight.code_type) != (64, "int3"):
        return small, "equal shares of the tiles for every multiprocessor"
    return None


def has_room_for_pairs(weight: PackedWeight, card: Card) -> bool:
    return weight.table is not None and card.shared_of_processor >= _ROOM_FOR_PAIRS


def candidates(weight: PackedWeight, most: int) -> Iterator[Choice]:
    """Those that won somewhere in a wide sweep on an H200, and some that nobody has timed yet."""
    for outputs, tokens, warps, stages, first in _SKINNY_TRIED[most]:
        for splits in splits_to_try(weight.outputs, outputs, most, tokens, weight.chunks):
            yield Choice("skinny", SkinnyConfig(outputs, tokens, warps, stages, splits, first), "")
    yield from _for_few_tokens(weight, most)
    pairs = has_room_for_pairs(weight, card_of(weight.device))
    for outputs, tokens, warps, stages in _PAIRS_TRIED.get(most, []) if pairs else []:
        for splits in splits_to_try(weight.outputs, outputs, most, tokens, weight.chunks):
            if weight.rows % outputs == 0:
                yield Choice("skinny", SkinnyConfig(outputs, tokens, warps, stages, splits, copies=32), "")
    if most >= 128:
        yield Choice("dequantize", None, "")
    if most >= 64 and hopper.supports(weight):
        yield from (Choice("hopper", config, "") for config in hopper_configs(weight, most))


def _for_few_tokens(weight: PackedWeight, most: int) -> Iterator[Choice]:
    """Shorter waits: products of one group that do not wait for each other. A tensor core takes 16 inputs and more."""
    halves = most <= 8 and not weight.one_group and weight.group >= 32
    for tile in _SKINNY[8] if halves else ():
        for splits in splits_to_try(weight.outputs, tile.outputs, most, tile.tokens, weight.chunks):
            yield Choice("skinny", replace(tile, splits=splits, sums=2), "")


def hopper_configs(weight: PackedWeight, most: int) -> Iterator[HopperConfig]:
    """Those whose tiles are not mostly empty, and that split no more than fills a large GPU."""
    for config in _HOPPER_TRIED:
        tiles = -(-weight.outputs // config.outputs) * -(-most // config.tokens)
        fills = config.tokens <= most and (config.splits <= 1 or tiles * config.splits <= 160)
        if fills and not _spills(weight, config):
            yield config


def _spills(weight: PackedWeight, config: HopperConfig) -> bool:
    """Three groups of warps with 128 tokens have no registers left for 8-bit words, nor for a table's values with a
    scale for 16 or 32 inputs."""
    crowded = weight.code_type == "int8" or _has_fine_scales(weight)
    return crowded and config.outputs > 128 and config.tokens > 64


def _has_fine_scales(weight: PackedWeight) -> bool:
    """MXFP4 and NVFP4: scales take the registers that values of a table leave."""
    return weight.table is not None and weight.group < 64
