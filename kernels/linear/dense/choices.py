"""The kernels of weights that are not quantized, which of them runs where nothing was measured, what to measure."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.kernels.card import Card
from quantkit.kernels.linear.cost import ESTIMATED, Product, cheapest
from quantkit.kernels.linear.dense import cublas, half
from quantkit.kernels.linear.dense.half import HalfConfig
from quantkit.kernels.linear.dense.weight import BUCKETS, HalfWeight
from quantkit.kernels.linear.dispatch import bucket_of
from quantkit.kernels.linear.splits import MOST_TILES, splits_to_try
from quantkit.kernels.linear.weight import Choice, by_name, unmeasured

KERNELS = by_name(half.KERNEL, cublas.KERNEL)

# Most tokens -> the tile that the sweep on an H200 favoured (docs/explanations/kernels.md).
_DEFAULTS = {
    1: HalfConfig(4, 1, 1024, 4, 1),
    8: HalfConfig(64, 16, 128, 4, 4),
    16: HalfConfig(64, 16, 128, 4, 4),
}
_MANY_OUTPUTS = HalfConfig(8, 1, 512, 2, 1)  # vocabularies of 262,144 tokens
_LARGE = 1 << 22  # weights: 8 MB, which an H200 reads in 2 us; below, launching takes longer than reading

# Most tokens -> (outputs, tokens, depth, warps, stages)
_FEW_TOKENS = [(64, 16, 128, 4, 4), (64, 16, 128, 4, 6), (64, 16, 128, 4, 8), (64, 16, 256, 4, 4), (128, 16, 128, 4, 3)]
_TRIED: dict[int, list[tuple[int, int, int, int, int]]] = {
    1: [(2, 1, 2048, 4, 1), (2, 1, 4096, 4, 1), (4, 1, 1024, 4, 1), (4, 1, 2048, 4, 1), (8, 1, 512, 2, 1),
        (32, 8, 256, 2, 3), *_FEW_TOKENS],
    8: [(32, 8, 256, 2, 3), (32, 8, 256, 2, 4), (64, 8, 128, 4, 4), *_FEW_TOKENS],
    16: _FEW_TOKENS,
    32: [(64, 32, 128, 4, 3), (64, 32, 128, 4, 4), (64, 32, 128, 4, 6), (128, 32, 128, 4, 4)],
    64: [(64, 64, 128, 4, 4), (256, 64, 64, 8, 4), (64, 32, 128, 4, 6)],
}  # fmt: skip


def default(weight: HalfWeight, tokens: int, card: Card) -> Choice:
    """Our kernel where few tokens meet many weights, cut as `cost.py` expects it to be fastest; else cuBLAS."""
    if tokens > BUCKETS[-1]:
        return Choice("cublas", None, f"not quantized, and more than {BUCKETS[-1]} tokens")
    why, most = unmeasured(weight), bucket_of(tokens, BUCKETS)
    if most not in _DEFAULTS or weight.outputs * weight.inputs < _LARGE or weight.inputs % 8:
        return Choice("cublas", None, f"{why}; many tokens, or few weights")
    tile = _DEFAULTS[most]
    if weight.outputs > MOST_TILES * tile.outputs:
        tile = _MANY_OUTPUTS
    product = Product(weight.outputs, weight.inputs, most, bytes_a_weight=2.0, decoded=False)
    return Choice("half", cheapest(product, (tile,), card), f"{why}; {ESTIMATED}")


def candidates(weight: HalfWeight, most: int) -> Iterator[Choice]:
    """Those that won somewhere in a wide sweep on an H200."""
    for outputs, tokens, depth, warps, stages in _TRIED[most]:
        for splits in splits_to_try(weight.outputs, outputs, most, tokens, weight.inputs // depth):
            yield Choice("half", HalfConfig(outputs, tokens, depth, warps, stages, splits), "")
    yield Choice("cublas", None, "")
