"""How a layer of experts is cut for a number of tokens: the one place to change after a measurement.

What decides is the load: pairs of an expert, if all were chosen equally often. `_PACKED` and `_PROMPTS` were measured
on an H200 (W4, 128 experts of 768 x 2,048), the others were not; `python -m quantkit.eval.kernels.experts --tried`
times every candidate of a shape on the GPU that is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quantkit.kernels.card import NO_GPU, Card
from quantkit.kernels.linear.grouped.routes import most_tiles
from quantkit.kernels.linear.grouped.tile import TileConfig
from quantkit.kernels.linear.grouped.weight import GroupedEightBit, GroupedHalf, GroupedPacked, GroupedWeight
from quantkit.kernels.linear.weight import TICKETS, padded

_ENOUGH = 3  # programs for each multiprocessor, from which inputs are not split
_SPLITS = (1, 2, 4, 8)
_FEWEST_STEPS = 2  # of a split
_LEAST_OF_3_BITS = 5  # load: tiles of 16 pairs, as dense layers have it (`weight_only/choices.py`)
_LARGEST_IN_REGISTERS = 22  # load: larger tiles of codes and 8 bits spill where a warp holds its operands itself
_LARGEST_EMULATED = 10  # load: larger tiles of FP8 spill where a card decodes it in registers
_PAIRS_ROOM = 160 << 10  # bytes of shared memory of a multiprocessor, for tables of pairs


@dataclass(frozen=True)
class Way:
    """Pairs of a tile, how both products are cut, and whether packed weights are decoded to memory first."""

    tile: int
    gate_up: TileConfig
    down: TileConfig
    decoded: bool = False


# Largest load -> way. For codes that are decoded in registers:
_PACKED = {
    4: Way(8, TileConfig(32, 2, 3), TileConfig(64, 4, 3)),
    10: Way(16, TileConfig(64, 4, 3), TileConfig(64, 4, 3)),
    22: Way(32, TileConfig(64, 4, 3), TileConfig(64, 4, 3)),
    64: Way(64, TileConfig(64, 8, 3), TileConfig(64, 4, 3)),
}
# For weights of 16 bits, and for packed ones above the largest load there.
_HALF = {
    4: Way(16, TileConfig(32, 4, 4), TileConfig(64, 4, 4)),
    10: Way(16, TileConfig(32, 4, 4), TileConfig(64, 4, 4)),
    22: Way(32, TileConfig(64, 4, 3), TileConfig(64, 4, 4)),
    64: Way(64, TileConfig(64, 8, 3, depth=64), TileConfig(128, 8, 3, depth=64)),
}
# For weights of 8 bits. Tiles of 64 pairs and more have warps enough for two sums and a product of FP8 beside them.
_EIGHT_BIT = {
    4: Way(8, TileConfig(32, 2, 3), TileConfig(64, 2, 3)),
    10: Way(16, TileConfig(64, 4, 3), TileConfig(64, 4, 4)),
    22: Way(32, TileConfig(64, 4, 3), TileConfig(64, 4, 4)),
    64: Way(64, TileConfig(64, 8, 3), TileConfig(64, 4, 3)),
}
_PROMPTS = Way(128, TileConfig(128, 8, 3, depth=64, streamed=False), TileConfig(128, 8, 3, depth=64, streamed=False))
# Where a warp holds its operands itself, and for little shared memory.
_SMALL_PROMPTS = Way(64, TileConfig(64, 8, 2, depth=64, streamed=False), TileConfig(64, 4, 3, depth=64, streamed=False))
# Where sums lie in tensor memory: they leave it through registers, so that these need more warps or fewer outputs.
_FROM_TENSOR_MEMORY = {
    _HALF[22]: replace(_HALF[22], gate_up=TileConfig(64, 8, 3)),
    _PROMPTS: replace(_PROMPTS, gate_up=TileConfig(64, 8, 3, depth=64, streamed=False)),
}
# For a scale of every 16 inputs (NVFP4), where a warp holds its operands itself.
_OF_FINE_SCALES = {_PACKED[22]: replace(_PACKED[22], gate_up=TileConfig(64, 4, 2))}

# For FP8 beside activations of 16 bits, where products come from shared memory.
_EXACT = {_EIGHT_BIT[22]: replace(_EIGHT_BIT[22], gate_up=TileConfig(64, 8, 3))}

_EIGHT_BIT_PROMPTS = Way(128, TileConfig(64, 8, 3, streamed=False), TileConfig(128, 8, 3, streamed=False))
_SMALL_EIGHT_BIT_PROMPTS = Way(64, TileConfig(64, 8, 2, streamed=False), TileConfig(64, 8, 2, streamed=False))
# The same where sums lie in tensor memory, and LLM.int8 multiplies once more, in 16 bits.
_OF_OUTLIERS = {
    _EIGHT_BIT[64]: replace(_EIGHT_BIT[64], gate_up=TileConfig(32, 4, 3)),
    _EIGHT_BIT_PROMPTS: Way(128, TileConfig(32, 8, 3, streamed=False), TileConfig(64, 8, 3, streamed=False)),
}
_IN_TILES = ("fp8-static", "fp8-block-blocks")  # scales within a tile need the registers of smaller ones
_EMULATED = Way(32, TileConfig(32, 4, 2, streamed=False), TileConfig(32, 4, 2, streamed=False))

# What is worth a measurement: pairs of a tile -> (outputs, warps, stages) of both products, for codes and for 8 bits
_PACKED_TRIED = {
    8: ((32, 2, 3), (32, 2, 4), (64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 3), (128, 8, 3)),
    16: ((32, 2, 3), (64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3)),
    32: ((64, 4, 3), (64, 8, 3), (128, 8, 3)),
    64: ((64, 4, 3), (64, 8, 3), (128, 8, 3)),
    128: ((64, 8, 3), (128, 8, 3)),
}
# pairs of a tile -> (outputs, warps, stages, depth)
_HALF_TRIED = {
    16: ((32, 4, 4, 128), (32, 2, 4, 128), (64, 4, 4, 128), (64, 4, 3, 256), (128, 4, 3, 128)),
    32: ((64, 4, 3, 128), (64, 4, 4, 64), (128, 8, 3, 64)),
    64: ((64, 4, 3, 64), (64, 8, 3, 64), (128, 8, 3, 64)),
    128: ((64, 4, 3, 64), (64, 8, 3, 64), (64, 8, 4, 64), (128, 8, 3, 64), (128, 8, 4, 64)),
    256: ((64, 8, 3, 64), (128, 8, 3, 64)),
}


def choose(gate_up: GroupedWeight, down: GroupedWeight, pairs: int, card: Card, experts: int | None = None) -> Way:
    """`experts`: that the pairs are divided among, where other ranks have some of them."""
    load = pairs / (experts or down.count)
    if gate_up.kind.startswith("int3"):
        load = max(load, _LEAST_OF_3_BITS)
    packed, eight_bit = isinstance(gate_up, GroupedPacked), isinstance(gate_up, GroupedEightBit)
    if load > _LARGEST_EMULATED and gate_up.kind.startswith("fp8") and card is not NO_GPU and not card.has_float8:
        return _EMULATED
    table = _PACKED if packed else _EIGHT_BIT if eight_bit else _HALF
    most = next((most for most in table if load <= most), None)
    if most is None:
        large = card is NO_GPU or card.multiplies_from_shared
        if eight_bit:
            if not large or gate_up.kind in _IN_TILES:
                return _SMALL_EIGHT_BIT_PROMPTS
            return _suited(_EIGHT_BIT_PROMPTS, gate_up, card)
        return replace(_suited(_PROMPTS if large else _SMALL_PROMPTS, gate_up, card), decoded=packed)
    if (packed or eight_bit) and card is not NO_GPU and not card.multiplies_from_shared:
        most = min(most, _LARGEST_IN_REGISTERS)
    way = _suited(table[most], gate_up, card)
    return replace(
        way,
        gate_up=_fitted(way.gate_up, gate_up, pairs, way.tile, down.count, card),
        down=_fitted(way.down, down, pairs, way.tile, down.count, card),
    )


def _suited(way: Way, gate_up: GroupedWeight, card: Card) -> Way:
    """What does not spill on this card."""
    if card.has_tensor_memory and gate_up.kind == "int8-outliers":
        return _OF_OUTLIERS.get(way, way)
    if card.has_tensor_memory:
        return _FROM_TENSOR_MEMORY.get(way, way)
    if gate_up.kind == "fp8-exact" and card.multiplies_from_shared:
        return _EXACT.get(way, way)
    if isinstance(gate_up, GroupedPacked) and gate_up.first.group < 32 and not card.multiplies_from_shared:
        return _OF_FINE_SCALES.get(way, way)
    return way


def _fitted(config: TileConfig, weight: GroupedWeight, pairs: int, tile: int, experts: int, card: Card) -> TileConfig:
    """With tables of pairs where they help, and shared out to more programs where the tiles that are likely there are
    fewer than the multiprocessors want."""
    if has_table(weight) and card.shared_of_processor >= _PAIRS_ROOM:
        config = replace(config, copies=32)
    down = padded(weight.outputs, config.outputs) // config.outputs
    programs = min(pairs, experts) * down
    if most_tiles(pairs, experts, tile) * down > TICKETS:
        return config
    steps = -(-weight.inputs // config.depth)
    able = [splits for splits in _SPLITS if splits == 1 or steps >= _FEWEST_STEPS * splits]
    enough = (splits for splits in able if programs * splits >= _ENOUGH * card.processors)
    return replace(config, splits=next(enough, able[-1]))


def candidates(weight: GroupedWeight, pairs: int, experts: int) -> Iterator[tuple[int, TileConfig]]:
    """(pairs of a tile, config) of one product; what a GPU has no room for is passed by when it is measured."""
    half = isinstance(weight, GroupedHalf)
    for tile, configs in (_HALF_TRIED if half else _PACKED_TRIED).items():
        if tile > max(16, 4 * pairs / experts):
            continue
        for outputs, warps, stages, *depth in configs:
            config = TileConfig(outputs, warps, stages, depth=depth[0] if depth else 128, streamed=pairs < 64 * experts)
            tiles = most_tiles(pairs, experts, tile) * padded(weight.outputs, outputs) // outputs
            steps = -(-weight.inputs // config.depth)
            for splits in _SPLITS:
                if splits == 1 or (tiles <= TICKETS and steps >= _FEWEST_STEPS * splits):
                    for copies in (0, 32) if has_table(weight) else (0,):
                        yield tile, replace(config, splits=splits, copies=copies)


def has_table(weight: GroupedWeight) -> bool:
    return isinstance(weight, GroupedPacked) and weight.first.table is not None
