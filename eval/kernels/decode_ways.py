"""Times of decoding over caches of integers, tokens as rows against query heads as rows, and over 16 bits beside them.

    python -m quantkit.eval.kernels.decode_ways int8 int4 --batch 32x1024,256x1024

Heads are those of Llama 3.1 8B. A way whose result is not that of the first is named and not timed. Where one of
`INTEGERS_TRIED` wins by more than noise, it belongs into `integer_decode_config`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from quantkit.eval.kernels.timing import Clock, clock_for
from quantkit.kernels.attention.attend import attend
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.attention.decode_plan import (
    INTEGERS_TRIED,
    DecodeConfig,
    decode_config,
    integer_decode_config,
)
from quantkit.kernels.attention.integer_codes import BY_DTYPE, BY_NAME
from quantkit.kernels.card import card_of
from quantkit.kernels.reference.compare import relative_error

_BATCHES = "1x8192,32x1024,64x1024,256x1024,256x4096"
_LARGEST_ERROR = 1e-2  # from the first way's result: both round


@dataclass(frozen=True)
class Heads:
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128


@dataclass(frozen=True)
class Line:
    """`microseconds` is None where the result was wrong."""

    cache: str
    way: str
    microseconds: float | None
    error: float


def lines_of(cache: str, sequences: int, context: int, clock: Clock, heads: Heads = Heads()) -> Iterator[Line]:
    """Query heads as rows, then tokens as rows in every way; a cache of 16 bits has only one."""
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float16  # what the interpreter can multiply
    kept = None if cache == "16-bit" else BY_NAME[cache].dtype
    batches = _batches(sequences, context, dtype, kept, clock, heads)
    ways = {"query heads as rows": None} if kept is None else _ways(BY_NAME[cache].bits, sequences, clock.device, heads)
    expected = _decode(batches[0], next(iter(ways.values())))
    for name, way in ways.items():
        error = relative_error(_decode(batches[0], way), expected)
        wrong = not error < _LARGEST_ERROR  # NaN is wrong, too
        time = None if wrong else clock.time([partial(_decode, batch, way) for batch in batches]).median
        yield Line(cache, name, time, error)


def _ways(bits: int, sequences: int, device: torch.device, heads: Heads) -> dict[str, DecodeConfig | None]:
    card, pairs = card_of(device), sequences * heads.kv_heads
    shape = (triton.next_power_of_2(heads.head_dim), 1, heads.group, pairs, card.processors)
    chosen = integer_decode_config(shape[0], bits, pairs)
    tried = {f"{config}{', default' if config == chosen else ''}": config for config in INTEGERS_TRIED}
    return {"query heads as rows": decode_config(*shape, card, integers=True), **tried}


def _batches(
    sequences: int, context: int, dtype: torch.dtype, kept: torch.dtype | None, clock: Clock, heads: Heads
) -> list[Batch]:
    """So many that none finds its keys in the second-level cache."""
    bits = 16 if kept is None else BY_DTYPE[kept].bits
    size = 2 * sequences * context * heads.kv_heads * heads.head_dim * bits // 8
    return [
        random_batch(
            [context] * sequences,
            [1] * sequences,
            kv_heads=heads.kv_heads,
            group=heads.group,
            head_dim=heads.head_dim,
            dtype=dtype,
            cache_dtype=kept,
            device=clock.device,
            seed=seed,
        )
        for seed in range(clock.copies(size))
    ]


def _decode(batch: Batch, way: DecodeConfig | None) -> Tensor:
    return attend(*batch.tensors, **batch.options, max_queries=1, decode=way)


def _sizes(text: str) -> list[tuple[int, int]]:
    try:
        return [(int(sequences), int(context)) for sequences, context in (one.split("x") for one in text.split(","))]
    except ValueError:
        message = f"'{text}' is not sequences x tokens of each, such as 32x1024"
        raise argparse.ArgumentTypeError(message) from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="quantkit.eval.kernels.decode_ways")
    parser.add_argument("caches", nargs="+", choices=BY_NAME)
    parser.add_argument("--batch", type=_sizes, default=_BATCHES, help="sequences x tokens of each")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("quantkit: this needs a CUDA device")
    clock = clock_for("cuda")
    print(clock.describe())
    for sequences, context in given.batch:
        half = next(lines_of("16-bit", sequences, context, clock)).microseconds
        assert half is not None
        print(f"{sequences} x {context}: 16 bits {half:.1f} us")
        for cache in given.caches:
            for line in lines_of(cache, sequences, context, clock):
                time = line.microseconds
                took = "wrong" if time is None else f"{time:8.1f} us, {time / half:.2f} of 16 bits"
                print(f"  {cache} {took}  error {line.error:.1e}  {line.way}", flush=True)


if __name__ == "__main__":
    main()
