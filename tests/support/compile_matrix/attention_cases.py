"""Attention: head sizes and groups of the families, all kinds of cache, pages of several sizes; prompts, answers,
both, guesses, many answers; trees of guesses; caches of more elements than 32 bits count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from compile_matrix.attention_batch import (
    Heads,
    Latents,
    launch_attention,
    launch_expanded,
    launch_latents,
    launch_rotate,
)
from compile_matrix.case import FLOAT8, Case
from pairwise import cover
from quantkit.kernels.attention.decode_plan import INTEGERS_TRIED
from quantkit.kernels.attention.integer_codes import BY_DTYPE
from quantkit.kernels.card import Card

_HEADS = ((64, 4), (96, 1), (128, 4), (128, 7), (256, 2), (128, 1))  # size, and how many share keys
_NEW = ([300], [1, 1, 1], [200, 1], [5, 3], [1] * 400)  # tokens of each sequence
_PAGES = (16, 64, 256)  # tokens of one: fewer than a tile of keys, as many, more
_SPECIAL: tuple[dict[str, Any], ...] = ({}, {"window": 64}, {"soft_cap": 30.0}, {"sinks": True})
_MANY_PAGES = 2**31 // (16 * 128)  # of which the elements are more than 32 bits count


def attention_cases(card: Card) -> Iterator[Case]:
    caches = (None, FLOAT8) if card.has_float8 else (None,)
    for (size, group), kept, new, page, special in cover(_HEADS, (*caches, *BY_DTYPE), _NEW, _PAGES, _SPECIAL):
        heads = Heads(size, group, kept, page)
        name = f"attention {size} x {group} {kept or 'half'} pages of {page} {new[:3]} {special}"
        launch = lambda dtype, new=new, heads=heads, how=special: launch_attention(new, heads, dtype, **how)  # noqa: E731
        yield Case(name, launch)
    yield Case("attention of trees", lambda dtype: launch_attention([9, 9], Heads(), dtype, ancestors=True))
    yield from _latent_cases(caches)
    for new in _NEW[:2]:
        launch = lambda dtype, new=new: launch_attention(new, Heads(), dtype, pages=_MANY_PAGES)  # noqa: E731
        yield Case(f"attention over a large cache {new}", launch)
    for kept in BY_DTYPE:
        for count in (1, 100, 400):  # few programs, some for every multiprocessor, and many
            launch = lambda dtype, kept=kept, new=[1] * count: launch_attention(new, Heads(cache_dtype=kept), dtype)  # noqa: E731
            yield Case(f"attention of {count} answers {kept}", launch)
        for count in (100, 400):  # two new tokens each: query heads as rows
            launch = lambda dtype, kept=kept, new=[2] * count: launch_attention(new, Heads(cache_dtype=kept), dtype)  # noqa: E731
            yield Case(f"attention of {count} guesses {kept}", launch)
        launch = lambda dtype, kept=kept: launch_attention([9, 9], Heads(cache_dtype=kept), dtype, ancestors=True)  # noqa: E731
        yield Case(f"attention of trees {kept}", launch)
    yield from _integer_cases()


def _integer_cases() -> Iterator[Case]:
    """Tokens as rows: every candidate; the default beside other heads and what changes scores."""
    for kept, config in product(BY_DTYPE, INTEGERS_TRIED):
        launch = lambda dtype, kept=kept, how=config: launch_attention([1] * 9, Heads(128, 4, kept), dtype, decode=how)  # noqa: E731
        yield Case(f"attention of rows {kept} {config}", launch, tried=True)
    for (size, group), kept, special, new in cover(
        ((96, 1), (128, 7), (128, 8), (256, 2)), tuple(BY_DTYPE), _SPECIAL, ([1], [1] * 400)
    ):
        heads, how = Heads(size, group, kept), special | {"splits": 2}
        launch = lambda dtype, new=new, heads=heads, how=how: launch_attention(new, heads, dtype, **how)  # noqa: E731
        yield Case(f"attention of rows {size} x {group} {kept} {new[:1]} x {len(new)} {special}", launch)


def _latent_cases(caches: tuple[torch.dtype | None, ...]) -> Iterator[Case]:
    """Answers and guesses, pieces of prompts, what comes before both; of models with 16 and with 128 heads."""
    for heads, kept, splits, new in cover((16, 128), caches, (1, 4), ([1, 1, 1], [3, 3], [30, 1])):
        latents = Latents(heads, kept)
        launch = lambda dtype, new=new, how=(latents, splits): launch_latents(new, *how, dtype)  # noqa: E731
        yield Case(f"latents {heads} x {kept or 'half'} {new} in {splits}", launch)
    large = Latents(pages=2**31 // (16 * 576) + 1)
    yield Case("latents over a large cache", lambda dtype: launch_latents([1, 1, 1], large, 1, dtype))
    yield Case("latents of trees", lambda dtype: launch_latents([9, 9], Latents(), 1, dtype, ancestors=True))
    for kept in caches:
        yield Case(
            f"latents expanded {kept or 'half'}", lambda dtype, kept=kept: launch_expanded(Latents(16, kept), dtype)
        )
        for order in (True, False):
            launch = lambda dtype, kept=kept, order=order: launch_rotate(Latents(16, kept), order, dtype)  # noqa: E731
            yield Case(f"latents kept {kept or 'half'} {'interleaved' if order else 'in halves'}", launch)
