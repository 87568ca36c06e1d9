"""The 8-bit kernels, which of them runs where nothing was measured, and what is worth a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quantkit.kernels.card import NO_GPU, Card
from quantkit.kernels.linear.cost import ESTIMATED, Product, cheapest
from quantkit.kernels.linear.dispatch import bucket_of
from quantkit.kernels.linear.eight_bit import matmul, scaled_mm
from quantkit.kernels.linear.eight_bit.matmul import EightBitConfig
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.splits import splits_to_try
from quantkit.kernels.linear.weight import CHUNK, Choice, by_name, unmeasured

KERNELS = by_name(matmul.KERNEL, scaled_mm.KERNEL)

# Most tokens -> tiles that the sweep on an H200 favoured (docs/explanations/kernels.md).
_DEFAULTS = {
    8: (EightBitConfig(32, 8, 256, 2, 3), EightBitConfig(64, 8, 256, 2, 3)),
    16: (EightBitConfig(64, 16, 128, 2, 4),),
    32: (EightBitConfig(64, 32, 256, 4, 3),),
    64: (EightBitConfig(64, 64, 128, 4, 4),),
    128: (EightBitConfig(128, 64, 128, 4, 4),),
    256: (EightBitConfig(128, 64, 128, 4, 4),),
    512: (EightBitConfig(128, 128, 128, 4, 3),),
    1024: (EightBitConfig(128, 128, 128, 4, 3),),
}
_MOST_OF_A_WARP = 2048  # sums, where a warp holds its operands too, or sums of FP8 twice: more would spill
_FEWEST_FOR_ROWS = 512  # tokens of FP8 (H200: torch's own kernel won for all four layers of the table from here on)
_FEWEST_FOR_BLOCKS = 256  # tokens (H200: 0.6 to 1.3 of bf16's time from here on, the Triton kernel 3 to 4 times it)

# Most tokens -> (outputs, tokens, depth, warps, stages)
_MANY = [
    (128, 64, 128, 4, 4),
    (128, 128, 128, 4, 3),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
]
_TRIED: dict[int, list[tuple[int, int, int, int, int]]] = {
    8: [(32, 8, 256, 2, 3), (32, 8, 256, 2, 4), (32, 8, 256, 1, 3), (64, 8, 128, 2, 4), (64, 8, 256, 2, 3)],
    16: [(64, 16, 128, 2, 4), (32, 16, 256, 2, 3), (64, 16, 256, 2, 3), (64, 16, 128, 4, 3), (128, 16, 256, 4, 3)],
    32: [(64, 32, 256, 4, 3), (64, 32, 128, 4, 4), (128, 32, 128, 4, 4)],
    64: [(64, 64, 128, 4, 4), (128, 64, 128, 8, 4), (64, 32, 256, 4, 3)],
    128: _MANY,
    256: _MANY,
    512: _MANY,
    1024: _MANY,
}


def default(weight: EightBitWeight, tokens: int, card: Card, dtype: torch.dtype) -> Choice:
    """Tiles that the sweep favoured, cut as `cost.py` expects it to be fastest."""
    most = bucket_of(tokens)
    blocks = weight.scales.ndim == 2
    if most >= (_FEWEST_FOR_BLOCKS if blocks else _FEWEST_FOR_ROWS) and scaled_mm.supports(weight, dtype):
        return Choice("scaled_mm", None, "many tokens in FP8, which torch's own kernel does best")
    tiles = _DEFAULTS[most]
    if weight.code_type == "fp8" or (card is not NO_GPU and not card.has_warpgroups):  # which Blackwell lost for bytes
        tiles = tuple(_with_room(tile) for tile in tiles)
    if blocks or any(weight.columns % tile.depth for tile in tiles):
        tiles = tuple(replace(tile, depth=CHUNK) for tile in tiles)  # which divides every weight's columns and blocks
    product = Product(weight.outputs, weight.columns, most, bytes_a_weight=1.0, bytes_a_token=1, decoded=False)
    return Choice("eight_bit", cheapest(product, tiles, card), f"{unmeasured(weight)}; {ESTIMATED}")


def _with_room(tile: EightBitConfig) -> EightBitConfig:
    return replace(tile, warps=max(tile.warps, tile.outputs * tile.tokens // _MOST_OF_A_WARP))


def candidates(weight: EightBitWeight, most: int) -> Iterator[Choice]:
    """Those that won somewhere in a wide sweep on an H200."""
    for outputs, tokens, depth, warps, stages in _TRIED[most]:
        if weight.columns % depth == 0 and (depth == CHUNK or weight.scales.ndim == 1):
            for splits in splits_to_try(weight.outputs, outputs, most, tokens, weight.columns // depth):
                yield Choice("eight_bit", EightBitConfig(outputs, tokens, depth, warps, stages, splits), "")
    if scaled_mm.supports(weight):
        yield Choice("scaled_mm", None, "")
