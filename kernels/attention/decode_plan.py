"""How the decode kernel is launched: its configuration, into how many parts contexts are divided, where parts meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.kernels.card import NO_GPU, Card

LARGEST_ROWS = 64
MOST_NODES = 62  # new tokens of a sequence with ancestors
MOST_SPLITS = 128
MOST_PROGRAMS_PER_SM = 4  # of the default configurations
FEW_PAIRS = 16  # over int4; 64 have been seen to be many


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is compiled (`block_n` tokens a tile) and how many programs a multiprocessor gets."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True)
class IntegerDecodeConfig(DecodeConfig):
    """The same for tokens as rows over a cache of integers (`decode_integers.py`)."""


# Compiled without spilling for a head of 128; `python -m quantkit.eval.kernels.decode_ways int8 int4` times them.
INTEGERS_TRIED = (
    IntegerDecodeConfig(32, 1, 3, 4),
    IntegerDecodeConfig(32, 1, 4, 8),
    IntegerDecodeConfig(64, 1, 3, 4),
    IntegerDecodeConfig(64, 1, 2, 8),
    IntegerDecodeConfig(64, 2, 3, 2),
    IntegerDecodeConfig(64, 2, 3, 4),
)


def decode_config(
    padded_dim: int,
    itemsize: int,
    rows: int,
    pairs: int,
    processors: int,
    card: Card = NO_GPU,
    *,
    integers: bool = False,
) -> DecodeConfig:
    """The default that a card has room for: smaller tiles where shared memory is scarce, and over a cache of integers,
    where a thread holds more sums.

    Integers of 32 sequences on an H200 (8 KV heads of dim 128), programs of two warps against four: int8 32x1024 tokens
    33 / 38 us, 32x4096 98 / 134; int4 26 / 32 and 83 / 116.
    """
    config = favoured_config(padded_dim, itemsize, rows, pairs, processors)
    if integers:
        config = replace(config, block_n=min(config.block_n, 64 if rows <= 16 else 32))
        if padded_dim == 128 and rows <= 16 and config.programs_per_sm == 2:  # neither few pairs nor many
            config = replace(config, num_warps=2, programs_per_sm=MOST_PROGRAMS_PER_SM)
    while config.block_n > 16 and _shared_bytes(config, padded_dim, itemsize, rows) > card.shared:
        config = replace(config, block_n=config.block_n // 2)
    return config


def integer_decode_config(padded_dim: int, bits: int, pairs: int) -> IntegerDecodeConfig:
    """The default for tokens as rows; `pairs` as in `favoured_config`.

    On an H200 with 8 KV heads of dim 128, programs of two warps against those of one, microseconds: int8 1x8192 tokens
    20.1 / 23.9, 8x2048 16.5 / 17.3, 32x1024 22.3 / 25.8, 256x1024 138.8 / 140.3; int4 19.1 / 22.2, 16.4 / 14.5, 21.5 /
    18.9, 116.4 / 82.2.
    """
    if padded_dim == 256:
        return IntegerDecodeConfig(32, 1, 3, 4)
    two_warps = bits == 8 or pairs <= FEW_PAIRS
    return IntegerDecodeConfig(64, 2, 3, 2) if two_warps else IntegerDecodeConfig(64, 1, 3, 4)


def _shared_bytes(config: DecodeConfig, padded_dim: int, itemsize: int, rows: int) -> int:
    """Keys and values that are on their way, queries, and room to turn tiles around."""
    tile = config.block_n * padded_dim
    return 2 * (config.num_stages - 1) * tile * itemsize + (2 * tile if itemsize == 1 else 0) + 4 * rows * padded_dim


def favoured_config(padded_dim: int, itemsize: int, rows: int, pairs: int, processors: int) -> DecodeConfig:
    """The default for a head dimension, a cache element size, the most rows of a sequence, and how many programs a call
    has without splits: `pairs` of a sequence and a KV head.

    Few pairs get one program with large tiles per multiprocessor, many get small programs. On an H200 with 8 KV heads
    of dim 128 in bfloat16, the first against the second: 1x8192 tokens 16.6 / 25.4 us, 1x32768 40.2 / 50.1, 8x2048
    23.2 / 25.3, 32x1024 38.5 / 35.8, 128x1024 134.9 / 127.7, 256x1024 254.4 / 243.9.

    Reading a cache of 8 bits takes half as long, and then converting counts: programs of one warp, which wait for
    nobody, take 99 us for 256x652 (those of four 132). That needs so many pairs that no context is divided.
    """
    few = 2 * pairs <= processors  # so that splits fill at least two thirds of the multiprocessors
    num_warps = 8 if rows > 32 else 4  # fewer do not hold the sums in registers
    if padded_dim == 256:
        return DecodeConfig(block_n=32, num_warps=num_warps, num_stages=3, programs_per_sm=2)
    if itemsize == 1 and padded_dim == 128 and rows <= 16 and pairs >= MOST_PROGRAMS_PER_SM * processors:
        return DecodeConfig(block_n=32, num_warps=1, num_stages=3, programs_per_sm=MOST_PROGRAMS_PER_SM)
    if padded_dim == 64 or itemsize == 1:
        return DecodeConfig(block_n=128, num_warps=num_warps, num_stages=3, programs_per_sm=1 if few else 2)
    if rows > 16:
        return DecodeConfig(block_n=64, num_warps=num_warps, num_stages=3, programs_per_sm=3)
    if few:
        return DecodeConfig(block_n=128, num_warps=4, num_stages=3, programs_per_sm=1)
    return DecodeConfig(block_n=64, num_warps=2, num_stages=3, programs_per_sm=3)


def choose_splits(pairs: int, max_context: int, programs: int, block_n: int) -> int:
    """Into how many parts to divide each context: about `programs` programs for `pairs` of a sequence and a KV head.

    No part is less than a tile.
    """
    tiles = -(-max_context // block_n)
    return max(1, min(programs // max(1, pairs), tiles, MOST_SPLITS))


def scratch_needs(pairs: int, splits: int, rows: int, padded_dim: int) -> dict[str, int]:
    """What `Scratch` must hold; nothing for a single split, which writes its result itself."""
    meeting = pairs if splits > 1 else 0
    return {"programs": meeting * splits, "rows": rows, "padded_dim": padded_dim, "counters": meeting}


@dataclass(frozen=True)
class Scratch:
    """Where the splits of one call meet. Tickets are zero between calls, so calls in a row may share one."""

    partial: Tensor  # float32 [programs * rows * padded_dim]
    stats: Tensor  # float32 [programs * rows * 2]: largest score, sum of weights
    tickets: Tensor  # int32 [sequences * kv_heads]

    @classmethod
    def allocate(
        cls, device: torch.device | str, *, programs: int, rows: int, padded_dim: int, counters: int
    ) -> Scratch:
        return cls(
            partial=torch.empty(programs * rows * padded_dim, dtype=torch.float32, device=device),
            stats=torch.empty(programs * rows * 2, dtype=torch.float32, device=device),
            tickets=torch.zeros(counters, dtype=torch.int32, device=device),
        )

    def holds(self, *, programs: int, rows: int, padded_dim: int, counters: int) -> bool:
        return (
            self.partial.numel() >= programs * rows * padded_dim
            and self.stats.numel() >= programs * rows * 2
            and self.tickets.numel() >= counters
        )
