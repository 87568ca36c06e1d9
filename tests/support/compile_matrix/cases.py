"""Every launch that the engine may make: kernels, and every configuration that dispatch can choose for them.

Tensors are small: what a kernel is compiled for are its configuration, its dtypes and which of its arguments multiples
of 16 are, not how large they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pairwise import cover
from quantkit.eval.kernels.cases import FORMATS
from quantkit.kernels.activation import ACTIVATIONS, gated_activation
from quantkit.kernels.attention.attend import attend
from quantkit.kernels.attention.batches import random_batch
from quantkit.kernels.card import Card
from quantkit.kernels.embedding import embed
from quantkit.kernels.gptq_columns import COLUMNS, round_columns
from quantkit.kernels.linear import dispatch
from quantkit.kernels.linear.dense import weight as dense
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.weight_only import weight as weight_only
from quantkit.kernels.linear.weight_only.dequantize import dequantize
from quantkit.kernels.norm import add_rms_norm, rms_norm
from quantkit.kernels.rotary import rotate_and_cache
from quantkit.kernels.sampling.greedy import greedy
from quantkit.kernels.sampling.sample import sample

OUTPUTS, INPUTS = 768, 512  # which all tiles divide
FLOAT8 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """`tried`: the tuner may measure it, and passes by what does not fit; nothing else chooses it."""

    name: str
    launch: Callable[[torch.dtype], object]
    tried: bool = False


def all_cases(card: Card) -> Iterator[Case]:
    """For a card: others are not asked for what it cannot do."""
    for name in FORMATS:
        yield from _linear(name, card)
    yield from _plain_linear(card)
    yield from _attention(card)
    yield from _small(card)


def _linear(name: str, card: Card) -> Iterator[Case]:
    weight = _weight(name)
    if getattr(weight, "code_type", "") == "fp8" and not card.has_float8:
        return
    for way in _ways(weight, card):
        yield Case(f"{name} {way}", lambda dtype, way=way: _run(weight, way, dtype), way.tried)


@cache
def _weight(name: str) -> Any:
    """As `op.prepare` lays it out on a GPU."""
    fmt = FORMATS[name]("bfloat16")
    quantized = fmt.quantize(0.02 * torch.randn(OUTPUTS, INPUTS))
    return eight_bit.lay_out(fmt, quantized) if eight_bit.takes(fmt) else weight_only.lay_out(quantized)


@dataclass(frozen=True)
class Way:
    kernel: str
    config: Any
    tokens: int
    tried: bool

    def __str__(self) -> str:
        return f"{self.kernel} {self.config} for {self.tokens}"


def _ways(weight: Any, card: Card) -> list[Way]:
    """Each once: the table's and the defaults, then what the tuner tries."""
    found: dict[tuple[str, Any], Way] = {}
    table = dispatch.table_of("nvidia-h200") if card.has_warpgroups else {}
    for most in weight.buckets:
        chosen = [weight.default(most, card)]
        for kind in (weight.kind, *weight.relatives):
            for entries in table.get(kind, {}).values():
                if str(most) in entries:
                    chosen.append(dispatch.from_entry(entries[str(most)], weight.kernels, ""))
        tried = list(weight.candidates(most))
        for number, choice in enumerate([*chosen, *tried]):
            config = choice.config
            if hasattr(config, "splits"):
                config = replace(config, splits=min(config.splits, 1))  # more are a number that kernels are given
            found.setdefault((choice.kernel, config), Way(choice.kernel, config, most, number >= len(chosen)))
    return list(found.values())


def _run(weight: Any, way: Way, dtype: torch.dtype) -> None:
    if way.kernel == "dequantize":
        dequantize(weight, dtype)
    elif way.kernel not in ("scaled_mm", "cublas"):  # which are torch's
        x = torch.zeros(way.tokens, weight.inputs, dtype=dtype)
        weight.kernels[way.kernel].run(x, weight, way.config, None, None)


def _plain_linear(card: Card) -> Iterator[Case]:
    for outputs in (OUTPUTS, 262_208):
        plain = {dtype: dense.lay_out(torch.zeros(outputs, INPUTS, dtype=dtype)) for dtype in HALVES}
        for way in _ways(plain[torch.bfloat16], card):
            launch = lambda dtype, way=way, plain=plain: _run(plain[dtype], way, dtype)  # noqa: E731
            yield Case(f"plain {outputs} {way}", launch, way.tried)


_HEADS = ((64, 4), (96, 1), (128, 4), (128, 7), (256, 2), (128, 1))  # size, and how many share keys
_BATCHES = (
    ([300], [300]),
    ([300, 40, 17], [1, 1, 1]),
    ([300, 40], [200, 1]),
    ([300, 40], [5, 3]),
    ([9] * 400, [1] * 400),
)  # contexts, and new tokens
_SPECIAL: tuple[dict[str, Any], ...] = ({}, {"window": 64}, {"soft_cap": 30.0})


def _attention(card: Card) -> Iterator[Case]:
    """Head sizes and groups of the families, both kinds of cache; prompts, answers, both, guesses, many answers."""
    caches = (None, FLOAT8) if card.has_float8 else (None,)
    for (head_dim, group), cache_dtype, batch, special in cover(_HEADS, caches, _BATCHES, _SPECIAL):
        options = {"head_dim": head_dim, "group": group, "cache_dtype": cache_dtype, **special}
        name = f"attention {head_dim} x {group} {cache_dtype or 'half'} {batch[1][:3]} {special}"
        yield Case(name, lambda dtype, batch=batch, options=options: _attend(batch, options, dtype))
    tree = {"head_dim": 128, "group": 4, "ancestors": True}
    yield Case("attention of trees", lambda dtype: _attend(([40, 30], [9, 9]), tree, dtype))


def _attend(batch: tuple[list[int], list[int]], options: dict[str, Any], dtype: torch.dtype) -> None:
    made = random_batch(*batch, dtype=dtype, **options)
    attend(*made.tensors, **made.options, max_queries=made.max_queries)


def _small(card: Card) -> Iterator[Case]:
    width = 2048

    def rows(dtype: torch.dtype, width: int = width) -> Tensor:
        return torch.zeros(5, width, dtype=dtype)

    yield Case("rms_norm", lambda dtype: rms_norm(rows(dtype), rows(dtype)[0], 1e-6))
    yield Case(
        "add_rms_norm", lambda dtype: add_rms_norm(rows(dtype), rows(dtype), rows(dtype)[0], 1e-6, plus_one=True)
    )
    for activation in ACTIVATIONS:
        yield Case(f"gated {activation}", lambda dtype, kind=activation: gated_activation(rows(dtype), kind))
    yield Case("embed", lambda dtype: embed(torch.arange(5), rows(dtype), scale=2.0))
    for head_dim in (64, 96, 128, 256):
        for kept in (None, FLOAT8) if card.has_float8 else (None,):
            yield Case(f"rotary {head_dim} {kept}", lambda dtype, how=(head_dim, kept): _rotate(*how, dtype))
    yield Case("greedy", lambda dtype: greedy(rows(dtype, 262_208)))
    yield Case("sample", lambda dtype: _sample(rows(dtype, 128_256)))
    yield Case("sample of float32", lambda dtype: _sample(rows(torch.float32, 50_257)))
    block = torch.zeros(COLUMNS, 96)
    yield Case("gptq", lambda dtype: round_columns(block, block + 1, block, torch.eye(COLUMNS), 15))


def _rotate(head_dim: int, kept: torch.dtype | None, dtype: torch.dtype) -> None:
    heads, kv_heads, tokens = 4, 2, 3
    qkv = torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    tables = torch.zeros(2, 32, head_dim // 2)
    keys, values = (torch.zeros(3, kv_heads, 16, head_dim, dtype=kept or dtype) for _ in range(2))
    scales = {} if kept is None else {"key_scales": torch.ones(kv_heads), "value_scales": torch.ones(kv_heads)}
    slots = torch.arange(tokens)
    rotate_and_cache(qkv, slots, tables[0], tables[1], slots, keys, values, heads, **scales)


def _sample(logits: Tensor) -> None:
    count = len(logits)
    ones = torch.ones(count)
    sample(logits, ones, ones.int(), ones, ones, ones.long(), ones.long())
