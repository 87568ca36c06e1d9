"""The kernels beside matmuls and attention: norms, activations, embedding, rotary, sampling, GPTQ's rounding and
learned rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compile_matrix.case import FLOAT8, Case
from pairwise import cover
from quantkit.kernels import learned_grid
from quantkit.kernels.activation import ACTIVATIONS, gated_activation
from quantkit.kernels.attention.integer_codes import BY_DTYPE
from quantkit.kernels.card import Card
from quantkit.kernels.embedding import embed
from quantkit.kernels.gptq_columns import COLUMNS, round_columns
from quantkit.kernels.norm import add_rms_norm, rms_norm
from quantkit.kernels.rotary import rotate_and_cache
from quantkit.kernels.sampling.greedy import greedy
from quantkit.kernels.sampling.sample import sample

_WIDTH = 2048
_NORM_WIDTHS = (2048, 5120, 8192, 16_384, 32_768)  # a program holds a row
_VOCABULARIES = (50_257, 128_256, 262_208)


def small_cases(card: Card) -> Iterator[Case]:
    for width in _NORM_WIDTHS:
        yield Case(f"rms_norm {width}", lambda dtype, width=width: _norm(dtype, width))
        yield Case(f"add_rms_norm {width}", lambda dtype, width=width: _add_norm(dtype, width))
    for activation in ACTIVATIONS:
        yield Case(f"gated {activation}", lambda dtype, kind=activation: gated_activation(_rows(dtype), kind))
    for scale in (None, 2.0):
        yield Case(f"embed {scale}", lambda dtype, scale=scale: embed(torch.arange(5), _rows(dtype), scale=scale))
    caches = (None, FLOAT8) if card.has_float8 else (None,)
    kinds = ((64, 96, 128, 256), (*caches, *BY_DTYPE), (None, False, True), (1, 2), (False, True))
    for head_dim, kept, norm, share, centred in cover(*kinds):
        how = {"head_dim": head_dim, "kept": kept, "plus_one": norm, "rotary_dim": head_dim // share}
        how |= {"centred": centred and kept is not None}
        name = f"rotary {head_dim} {kept or 'half'} norm {norm} of a {'half' if share == 2 else 'whole'} head"
        name += " centred" if how["centred"] else ""
        yield Case(name, lambda dtype, how=how: _rotate(dtype, **how))
    for vocabulary in _VOCABULARIES:
        yield Case(f"greedy {vocabulary}", lambda dtype, vocabulary=vocabulary: greedy(_rows(dtype, vocabulary)))
        yield Case(f"sample {vocabulary}", lambda dtype, vocabulary=vocabulary: _sample(_rows(dtype, vocabulary)))
    yield Case("sample of float32", lambda dtype: _sample(_rows(torch.float32, 50_257)))
    block = torch.zeros(2, COLUMNS, 96)
    for size in (32, 128, 8192, 14_336):  # of a group; the last two are whole rows
        yield Case(f"learned rounding {size}", lambda dtype, size=size: _learn(dtype, size))
    yield Case("gptq", lambda dtype: round_columns(block, block + 1, block, torch.eye(COLUMNS).expand(2, -1, -1), 15))


def _learn(dtype: torch.dtype, size: int) -> None:
    anchors, scales = torch.zeros(3, 2, size), torch.ones(3, 2)
    weight = torch.zeros(3, 2 * size, dtype=dtype)
    learned_grid.decode(anchors, anchors, scales, scales, 15, weight)
    for upstream in (weight, weight.float()):
        learned_grid.gradients(upstream, anchors, anchors, scales, scales, 15)


def _rows(dtype: torch.dtype, width: int = _WIDTH) -> Tensor:
    return torch.zeros(5, width, dtype=dtype)


def _norm(dtype: torch.dtype, width: int) -> None:
    rms_norm(_rows(dtype, width), torch.ones(width, dtype=dtype), 1e-6)


def _add_norm(dtype: torch.dtype, width: int) -> None:
    add_rms_norm(_rows(dtype, width), _rows(dtype, width), torch.ones(width, dtype=dtype), 1e-6, plus_one=True)


def _rotate(
    dtype: torch.dtype,
    head_dim: int,
    kept: torch.dtype | None,
    plus_one: bool | None,
    rotary_dim: int,
    centred: bool,
) -> None:
    """`plus_one` is of the heads' norm; None: they have none."""
    heads, kv_heads, tokens = 4, 2, 3
    qkv = torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = torch.zeros(2, 32, rotary_dim // 2)
    options: dict[str, Any] = {}
    if kept in BY_DTYPE:
        pages = torch.zeros(3, kv_heads, 16, BY_DTYPE[kept].token_bytes(head_dim), dtype=torch.uint8)
        keys, words = BY_DTYPE[kept].planes(pages)
        values, options = keys, {"key_scales": words, "value_scales": words}
    else:
        keys, values = (torch.zeros(3, kv_heads, 16, head_dim, dtype=kept or dtype) for _ in range(2))
    if kept is not None and kept not in BY_DTYPE:
        options |= {"key_scales": torch.ones(kv_heads), "value_scales": torch.ones(kv_heads)}
    if plus_one is not None:
        weight = torch.ones(head_dim, dtype=dtype)
        options |= {"q_norm": weight, "k_norm": weight, "plus_one": plus_one}
    if centred:
        options["key_centres"] = torch.zeros(kv_heads, head_dim)
    slots = torch.arange(tokens)
    rotate_and_cache(qkv, slots, cos, sin, slots, keys, values, heads, **options)


def _sample(logits: Tensor) -> None:
    count = len(logits)
    ones = torch.ones(count)
    sample(logits, ones, ones.int(), ones, ones, ones.long(), ones.long())
