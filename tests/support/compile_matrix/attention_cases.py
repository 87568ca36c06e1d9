"""Attention: head sizes and groups of the families, both kinds of cache, pages of several sizes; prompts, answers,
both, guesses, many answers; trees of guesses; caches of more elements than 32 bits count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compile_matrix.attention_batch import Heads, launch_attention, launch_latents
from compile_matrix.case import FLOAT8, Case
from pairwise import cover
from quantkit.kernels.card import Card

_HEADS = ((64, 4), (96, 1), (128, 4), (128, 7), (256, 2), (128, 1))  # size, and how many share keys
_NEW = ([300], [1, 1, 1], [200, 1], [5, 3], [1] * 400)  # tokens of each sequence
_PAGES = (16, 64, 256)  # tokens of one: fewer than a tile of keys, as many, more
_SPECIAL: tuple[dict[str, Any], ...] = ({}, {"window": 64}, {"soft_cap": 30.0}, {"sinks": True})
_MANY_PAGES = 2**31 // (16 * 128)  # of which the elements are more than 32 bits count


def attention_cases(card: Card) -> Iterator[Case]:
    caches = (None, FLOAT8) if card.has_float8 else (None,)
    for (size, group), kept, new, page, special in cover(_HEADS, caches, _NEW, _PAGES, _SPECIAL):
        heads = Heads(size, group, kept, page)
        name = f"attention {size} x {group} {kept or 'half'} pages of {page} {new[:3]} {special}"
        launch = lambda dtype, new=new, heads=heads, how=special: launch_attention(new, heads, dtype, **how)  # noqa: E731
        yield Case(name, launch)
    yield Case("attention of trees", lambda dtype: launch_attention([9, 9], Heads(), dtype, ancestors=True))
    for kept, splits in cover(caches, (1, 4)):
        launch = lambda dtype, kept=kept, splits=splits: launch_latents([3, 1], kept, splits, dtype)  # noqa: E731
        yield Case(f"latents {kept or 'half'} in {splits}", launch)
    yield Case("latents of trees", lambda dtype: launch_latents([9, 9], None, 1, dtype, ancestors=True))
    for new in _NEW[:2]:
        launch = lambda dtype, new=new: launch_attention(new, Heads(), dtype, pages=_MANY_PAGES)  # noqa: E731
        yield Case(f"attention over a large cache {new}", launch)
