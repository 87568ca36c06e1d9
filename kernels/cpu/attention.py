"""Attention over a paged cache on a CPU, for few new tokens of each sequence; meaning as `reference.attention.attend`.

A piece of work is one new token and one head of keys. Its queries are held, keys are read in their order, scores are
kept in memory, become weights, and values are added up by them. Prompts, trees, caps and caches of 8 bits are torch's.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import BYTES, load_floats, store_floats
from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import LANES, as_argument, exp, load_argument, load_integers, sum_along, total
from quantkit.kernels.reference import attention

MOST_QUERIES = 8  # new tokens of a sequence; more are faster as products of matrices
_LARGEST_HEAD = 256


class Kind(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    kept: torch.dtype  # of the caches
    head_dim: int
    sinks: bool


def attend(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    max_queries: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    scratch: None = None,
    **more: Any,
) -> Tensor:
    """What the heads of new tokens attend to, [tokens, heads, head_dim] in q's dtype; rows of no sequence are zero."""
    tokens, heads, head_dim = q.shape
    taken = (
        head_dim % LANES == 0 and head_dim <= _LARGEST_HEAD and cache_k.dtype in BYTES and max_queries <= MOST_QUERIES
    )
    if not taken or any(option is not None for option in more.values()):
        batch = (q, cache_k, cache_v, page_table, context_lengths, query_starts)
        return attention.attend(*batch, scale=scale, window=window, sinks=sinks, **more).to(q.dtype)
    q, sinks = q.contiguous(), None if sinks is None else sinks.float()
    kv_heads, page_size = cache_k.shape[1:3]
    out = torch.zeros_like(q)
    longest = page_table.shape[1] * page_size
    scores = torch.empty(tokens * heads, longest)
    arguments = [q.data_ptr(), cache_k.data_ptr(), cache_v.data_ptr(), page_table.data_ptr(), page_table.stride(0)]
    arguments += [context_lengths.data_ptr(), query_starts.data_ptr(), len(context_lengths), out.data_ptr()]
    arguments += [scores.data_ptr(), longest, heads, kv_heads, page_size, window or 1 << 40]
    arguments += [0 if sinks is None else sinks.data_ptr(), as_argument(scale)]
    kind = Kind(q.dtype, cache_k.dtype, head_dim, sinks is not None)
    shared_pool().run(_kernel(kind), arguments, tokens * kv_heads)
    return out


@cache
def _kernel(kind: Kind) -> int:
    return compiled("attend", 3, partial(_attend, kind=kind))


class Held(NamedTuple):
    """The arguments inside the kernel."""

    q: Value
    keys: Value
    values: Value
    table: Value
    table_stride: Value
    contexts: Value
    starts: Value
    sequences: Value
    out: Value
    scores: Value
    longest: Value
    heads: Value
    kv_heads: Value
    page_size: Value
    window: Value
    sinks: Value


def _attend(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    held = Held(*load_integers(code, arguments, len(Held._fields)))
    scale = load_argument(code, arguments, len(Held._fields))
    with code.loop(first, last) as piece:
        token = piece // held.kv_heads
        kv_head = piece - token * held.kv_heads
        with code.loop(0, held.sequences) as sequence:
            begin, end = (code.load(I32, held.starts, sequence + more).to(I64) for more in (0, 1))
            with code.when((begin < token + 1) & (token < end)):
                context = code.load(I32, held.contexts, sequence).to(I64)
                reach = context - (end - token) + 1
                low = reach - held.window
                low = code.select(low < 0, code.constant(I64, 0), low)
                table = held.table + sequence * held.table_stride * 4
                group = held.heads // held.kv_heads
                with code.loop(kv_head * group, (kv_head + 1) * group) as head:
                    _attend_head(code, kind, held, token, head, kv_head, table, low, reach, scale)


def _attend_head(
    code: Code,
    kind: Kind,
    held: Held,
    token: Value,
    head: Value,
    kv_head: Value,
    table: Value,
    low: Value,
    reach: Value,
    scale: Value,
) -> None:
    row = (token * held.heads + head) * kind.head_dim
    scores = held.scores + (token * held.heads + head) * held.longest * 4
    parts = range(0, kind.head_dim, LANES)
    queries = [load_floats(code, kind.dtype, LANES, held.q, row + part) * scale.splat(LANES) for part in parts]
    top = code.variable(code.constant(F32, -3.0e38))
    if kind.sinks:
        top.set(code.load(F32, held.sinks, head))

    def place_of(token: Value) -> Value:
        page = code.load(I32, table, token // held.page_size).to(I64)
        inside = token - token // held.page_size * held.page_size
        return ((page * held.kv_heads + kv_head) * held.page_size + inside) * kind.head_dim

    with code.loop(low, reach) as key:
        place = place_of(key)
        score = code.constant(F32.x(LANES), 0.0)
        for part, query in zip(parts, queries, strict=True):
            score = code.fma(query, load_floats(code, kind.kept, LANES, held.keys, place + part), score)
        number = total(score)
        code.store(number, scores, key)
        top.set(code.of_each("maximum", top.get(), number))
    highest = top.get()

    def weigh(place: Value, lanes: int) -> Value:
        at = low + place
        weight = exp(code, code.load(F32.x(lanes), scores, at) - highest.splat(lanes))
        code.store(weight, scores, at)
        return weight

    weights = sum_along(code, reach - low, weigh)
    if kind.sinks:
        weights = weights + exp(code, (code.load(F32, held.sinks, head) - highest).splat(1)).at(0)
    sums = [code.variable(code.constant(F32.x(LANES), 0.0)) for _ in parts]
    with code.loop(low, reach) as key:
        place, weight = place_of(key), code.load(F32, scores, key).splat(LANES)
        for part, added in zip(parts, sums, strict=True):
            value = load_floats(code, kind.kept, LANES, held.values, place + part)
            added.set(code.fma(weight, value, added.get()))
    factor = (code.constant(F32, 1.0) // weights).splat(LANES)
    for part, added in zip(parts, sums, strict=True):
        store_floats(code, kind.dtype, added.get() * factor, held.out, row + part)
