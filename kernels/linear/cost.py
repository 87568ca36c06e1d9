"""What a product would take on a card that nobody measured, to choose how it is cut.

A program goes through the steps of its share: it loads a piece of the weight, decodes it and multiplies. As many
programs as a multiprocessor has room for run at once; the product is such waves, the last one perhaps small. A step of
a wave takes about as long as the slowest of

    waiting     for a load, of which stages - 1 are on their way
    loading     what all programs of the wave load, at the bandwidth of memory
    computing   what the programs of one multiprocessor decode and multiply

Programs that share a tile meet in the end: a fixed price, one for each of them, and the sums that they leave in memory.

The constants were fitted to 794 timings on an H200: Llama 3.1 8B's layers in W4, NF4, LLM.int8 and bfloat16, 1 to 1,024
tokens. docs/reference/gpus.md says what the choices cost on these and other layers. Of a card only its bandwidth, its
multiprocessors and their room are asked: other cards were never measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from quantkit.kernels.card import Card
from quantkit.kernels.linear.splits import Tile, splits_to_try

ESTIMATED = "cut as its cost is estimated"  # a reason for a choice

_LOAD = 1.14  # microseconds until a load has arrived
_BANDWIDTH = 0.78  # of what a data sheet says
_DECODE = 19e-6  # microseconds of a multiprocessor for one weight
_MULTIPLY = 0.31e-6  # and for one product of two numbers of 16 bits; of 8 bits half of it
_MEET, _MEET_EACH = 1.16, 0.18  # microseconds, of programs that share a tile
_SUMS = 2.8  # times the bytes of the sums that they store
_BUSY = 8  # warps of a multiprocessor that keep it computing
_OWN = 40  # registers of a thread beside its tile


class Config(Tile, Protocol):
    """A kernel's config: how it cuts a product, and what a program needs for that."""

    @property
    def depth(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...


@dataclass(frozen=True)
class Product:
    """weight [outputs, inputs] times `tokens`.

    bytes_a_weight   as stored, scales included
    bytes_a_token    of one number of a token
    decoded          whether weights are decoded, or multiplied as they are
    table            bytes of shared memory that a program has beside its tiles
    """

    outputs: int
    inputs: int
    tokens: int
    bytes_a_weight: float
    bytes_a_token: int = 2
    decoded: bool = True
    table: int = 0


@cache
def cheapest(product: Product, tiles: Sequence[Config], card: Card) -> Any:
    """The one of these tiles, with the number of splits, that a product is expected to take the least time with."""
    cut = [
        replace(tile, splits=splits)  # type: ignore[type-var]  # configs are dataclasses
        for tile in tiles
        for splits in splits_to_try(
            product.outputs, tile.outputs, product.tokens, tile.tokens, product.inputs // tile.depth
        )
    ]
    return min(cut, key=lambda tile: microseconds(product, tile, card))


def microseconds(product: Product, tile: Config, card: Card) -> float:
    """Without what every way to cut the product takes, such as its launch."""
    steps = -(-product.inputs // tile.depth)
    share = -(-steps // tile.splits)
    splits = -(-steps // share)
    programs = -(-product.outputs // tile.outputs) * -(-product.tokens // tile.tokens) * splits
    full, rest = divmod(programs, card.processors * _programs_at_once(product, tile, card))
    waves = [(programs - rest) // full] * full if full else []
    time = sum(share * _step(product, tile, count, card) for count in (*waves, *([rest] if rest else [])))
    if splits > 1:
        sums = programs * tile.outputs * tile.tokens * 4
        time += _MEET + _MEET_EACH * splits + _SUMS * sums / card.bandwidth * 1e6
    return time


def fewest_tokens_for_bytes(more: float, card: Card) -> int:
    """From how many tokens on products of 8 bits instead of 16 pay for so many bytes more that move for each weight."""
    moved = more / (_BANDWIDTH * card.bandwidth) * 1e6
    gained = _MULTIPLY / 2 / card.processors
    return math.ceil(moved / gained)


def _step(product: Product, tile: Config, programs: int, card: Card) -> float:
    """Of a wave of programs, in microseconds."""
    weights = tile.outputs * tile.depth
    together = -(-programs // card.processors)
    work = _DECODE * weights if product.decoded else 0.0
    work += _MULTIPLY * weights * tile.tokens * product.bytes_a_token / 2
    parts = (
        _LOAD / max(1, tile.stages - 1),
        programs * weights * product.bytes_a_weight / (_BANDWIDTH * card.bandwidth) * 1e6,
        together * work / min(1.0, together * tile.warps / _BUSY),
    )
    return float(sum(part**4 for part in parts) ** 0.25)  # somewhat more than the largest of them


def _programs_at_once(product: Product, tile: Config, card: Card) -> int:
    """That a multiprocessor has warps, shared memory and registers for."""
    threads = 32 * tile.warps
    ahead = tile.depth * (tile.outputs * product.bytes_a_weight + tile.tokens * product.bytes_a_token)
    shared = (tile.stages - 1) * ahead + product.table + 1024
    registers = min(255.0, _OWN + (tile.outputs * tile.tokens + tile.outputs * tile.depth / 2) / threads)
    return max(1, int(min(card.warps // tile.warps, card.shared_of_processor / shared, 65536 / (threads * registers))))
