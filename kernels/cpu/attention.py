"""Attention over a paged cache on a CPU; meaning as `reference.attention.attend`.

For few new tokens of each sequence a piece of work is one of them and one head of keys. Its queries are held, keys are
read in their order, 16 at a time: their scores become weights, and values are added up by them. Prompts are
`attention_blocks.py`'s; trees, caps and caches of 8 bits or fewer are torch's.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.cpu.attention_blocks import MOST_ROWS, attend_blocks
from quantkit.kernels.cpu.attention_kind import Held, Kind
from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import BYTES, load_floats, store_floats
from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import LANES, as_argument, exp, total
from quantkit.kernels.reference import attention

MOST_QUERIES = 8  # new tokens of a sequence; more are faster as products of matrices
_LARGEST_HEAD = 256
_PARTS = 4  # of a head's values at a time, whose sums stay in registers
_LOWEST = -3.0e38


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
        head_dim % LANES == 0
        and head_dim <= _LARGEST_HEAD
        and cache_k.shape[2] % LANES == 0
        and cache_k.dtype in BYTES
        and heads // cache_k.shape[1] <= MOST_ROWS
    )
    if not taken or any(option is not None for option in more.values()):
        batch = (q, cache_k, cache_v, page_table, context_lengths, query_starts)
        return attention.attend(*batch, scale=scale, window=window, sinks=sinks, **more).to(q.dtype)
    q, sinks = q.contiguous(), None if sinks is None else sinks.float()
    kv_heads, page_size = cache_k.shape[1:3]
    out = torch.zeros(q.shape, dtype=q.dtype)
    arguments = [q.data_ptr(), cache_k.data_ptr(), cache_v.data_ptr(), page_table.data_ptr(), page_table.stride(0)]
    arguments += [context_lengths.data_ptr(), query_starts.data_ptr(), len(context_lengths), out.data_ptr()]
    arguments += [heads, kv_heads, page_size, window or 1 << 40]
    kind = Kind(q.dtype, cache_k.dtype, head_dim, sinks is not None)
    each = 1 if max_queries <= MOST_QUERIES else max(1, MOST_ROWS * kv_heads // heads)
    pieces = -(-tokens // each) * kv_heads
    arguments += [0 if sinks is None else sinks.data_ptr(), each, pieces, as_argument(scale)]
    shared_pool().run(_kernel(kind, max_queries > MOST_QUERIES), arguments, pieces)
    return out


@cache
def _kernel(kind: Kind, blocks: bool) -> int:
    return compiled("attend", 3, partial(attend_blocks if blocks else _attend, kind=kind))


def _attend(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    held, scale, _, _ = Held.read(code, arguments)
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
    row, parts = (token * held.heads + head) * kind.head_dim, range(0, kind.head_dim, LANES)
    queries = [load_floats(code, kind.dtype, LANES, held.q, row + part) * scale.splat(LANES) for part in parts]
    softmax = _Softmax(code, code.load(F32, held.sinks, head) if kind.sinks else None)
    sums = [code.variable(code.constant(F32.x(LANES), 0.0)) for _ in parts]
    with code.loop((low >> 4) << 4, reach, LANES) as chunk:  # a page has whole chunks
        page = code.load(I32, table, chunk // held.page_size).to(I64)
        inside = chunk - chunk // held.page_size * held.page_size
        place = ((page * held.kv_heads + kv_head) * held.page_size + inside) * kind.head_dim
        first = code.select(chunk < low, low, chunk) - chunk
        last = code.select(reach < chunk + LANES, reach - chunk, code.constant(I64, LANES))
        softmax.clear()
        with code.loop(first, last) as key:
            score = code.constant(F32.x(LANES), 0.0)
            for part, query in zip(parts, queries, strict=True):
                read = load_floats(code, kind.kept, LANES, held.keys, place + key * kind.head_dim + part)
                score = code.fma(query, read, score)
            code.store(total(score), softmax.scores, key)
        fading = softmax.weigh().splat(LANES)
        for start in range(0, len(sums), _PARTS):
            some = list(zip(parts, sums, strict=True))[start : start + _PARTS]
            for _, added in some:
                added.set(added.get() * fading)
            with code.loop(first, last) as key:
                weight = code.load(F32, softmax.scores, key).splat(LANES)
                for part, added in some:
                    read = load_floats(code, kind.kept, LANES, held.values, place + key * kind.head_dim + part)
                    added.set(code.fma(weight, read, added.get()))
    factor = (code.constant(F32, 1.0) // softmax.total.get()).splat(LANES)
    for part, added in zip(parts, sums, strict=True):
        store_floats(code, kind.dtype, added.get() * factor, held.out, row + part)


class _Softmax:
    """Over scores that come a chunk at a time: weights count from the largest so far, and earlier ones fade."""

    def __init__(self, code: Code, sink: Value | None) -> None:
        """A sink is the score of no token."""
        self.code = code
        self.scores = code.room(F32.x(LANES))  # of a chunk, then its weights
        self.top = code.variable(code.constant(F32, _LOWEST) if sink is None else sink)
        self.total = code.variable(code.constant(F32, 0.0 if sink is None else 1.0))

    def clear(self) -> None:
        self.code.store(self.code.constant(F32.x(LANES), _LOWEST), self.scores)

    def weigh(self) -> Value:
        """Makes weights of the scores, and returns by what earlier ones fade."""
        code, before = self.code, self.top.get()
        scores = code.load(F32.x(LANES), self.scores)
        self.top.set(code.of_each("maximum", before, code.over_lanes("fmaximum", scores)))
        weights = exp(code, scores - self.top.get().splat(LANES))
        code.store(weights, self.scores)
        fading = exp(code, (before - self.top.get()).splat(1)).at(0)
        self.total.set(code.fma(self.total.get(), fading, total(weights)))
        return fading
