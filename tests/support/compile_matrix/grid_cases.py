"""Launches of many programs: vocabularies as outputs of quantized weights, more tokens and sequences than 65,535.

Tensors without memory: nothing is compiled, and what torch would multiply costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compile_matrix.attention_batch import (
    Heads,
    Latents,
    launch_attention,
    launch_expanded,
    launch_latents,
    launch_rotate,
)
from compile_matrix.case import Case
from compile_matrix.weights import served_on, shapes_of_weight
from quantkit.kernels.activation import gated_activation
from quantkit.kernels.card import Card
from quantkit.kernels.embedding import embed
from quantkit.kernels.linear import op
from quantkit.kernels.norm import rms_norm
from quantkit.kernels.rotary import rotate_and_cache
from quantkit.kernels.sampling.sample import sample

_VOCABULARIES = (262_144, 262_208)
_INPUTS = 128
_TOKENS = (1, 64, 8192)
_MANY = 65_600  # more than a grid may have in its second and third direction
_BATCHES = ((_MANY, 1, 1), (_MANY, 2, 1), (1, _MANY, 1), (300, 300, 8192), (1, 1, 8192))  # sequences, new tokens, pages


def grid_cases(card: Card) -> Iterator[Case]:
    for name in served_on(card):
        for outputs in _VOCABULARIES:
            for tokens in _TOKENS:
                launch = lambda dtype, how=(name, outputs, tokens): _linear(*how, card, dtype)  # noqa: E731
                yield Case(f"grid of {name} {outputs} for {tokens}", launch, grid_only=True)
    for batch in _BATCHES:
        name = "grid of attention, {} sequences of {} new tokens and {} pages".format(*batch)
        launch = lambda dtype, batch=batch: _attend(*batch, dtype)  # noqa: E731
        yield Case(name, launch, grid_only=True)
    for sequences, new, _ in _BATCHES:
        launch = lambda dtype, new=[new] * sequences: _attend_latents(new, dtype)  # noqa: E731
        yield Case(f"grid of latents, {sequences} sequences of {new} new tokens", launch, grid_only=True)
    for name, launch in {"rotary": _rotate, "small kernels": _small, "sample": _sample}.items():
        yield Case(f"grid of {name} for {_MANY}", launch, grid_only=True)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _linear(name: str, outputs: int, tokens: int, card: Card, dtype: torch.dtype) -> None:
    weight = shapes_of_weight(name, outputs, _INPUTS)
    op.run(weight.default(tokens, card, dtype), _empty(tokens, _INPUTS, dtype=dtype), weight)


def _attend(sequences: int, new: int, pages: int, dtype: torch.dtype) -> None:
    launch_attention([new] * sequences, Heads(), dtype, table=pages)


def _attend_latents(new: list[int], dtype: torch.dtype) -> None:
    latents = Latents(heads=128)
    launch_rotate(latents, True, dtype, tokens=sum(new))
    launch_latents(new, latents, None, dtype)
    launch_expanded(latents, dtype, new=sum(new))


def _rotate(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 64, 8, 128
    qkv = _empty(_MANY, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    tables = (_empty(_MANY, head_dim // 2, dtype=torch.float32) for _ in range(2))
    slots = _empty(_MANY, dtype=torch.int64)
    caches = (_empty(4, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2))
    rotate_and_cache(qkv, slots, *tables, slots, *caches, heads)


def _small(dtype: torch.dtype) -> None:
    rows = _empty(_MANY, 8192, dtype=dtype)
    rms_norm(rows, rows[0], 1e-6)
    gated_activation(rows, "silu")
    embed(_empty(_MANY, dtype=torch.int64), rows)


def _sample(dtype: torch.dtype) -> None:
    floats, integers = _empty(_MANY, dtype=torch.float32), _empty(_MANY, dtype=torch.int64)
    counts = _empty(_MANY, dtype=torch.int32)
    sample(_empty(_MANY, 262_208, dtype=dtype), floats, counts, floats, floats, integers, integers)
