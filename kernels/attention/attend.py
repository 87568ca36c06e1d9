"""Attention over a paged cache for any batch: decoding, prefill and both at once.

    attend(q, cache_k, cache_v, page_table, context_lengths, query_starts, scale=..., max_queries=...)

Layout   q [tokens, heads, head_dim], bfloat16 or float16, the new tokens of all sequences behind each other
         cache_k, cache_v, page_table    see `cache.py`; the new tokens' keys and values are in the cache already
         context_lengths int32 [sequences]      tokens of the sequence in the cache, new ones included
         query_starts    int32 [sequences + 1]  q[query_starts[s] : query_starts[s + 1]] are the new tokens of s, the
                                                last of which stands at position context_lengths[s] - 1
         ancestors       int64 [tokens], contiguous, or None. The new tokens of a sequence are then nodes of a tree (or
                         of several), parents before children: bit j of a new token's entry is set where it sees new
                         token j of its own sequence, 0 being the first. The caller sets the bit of the token itself.
                         Old tokens are always seen. In a chain, the entry of token i is 2**(i + 1) - 1
         sinks           [heads], float, contiguous, or None: one more score of each query head, of a token without a
                         value, which scale and soft_cap leave alone
Limits   those of `cache.py`; heads a multiple of kv_heads, at most 64 times as many; no sequence has more than
         max_queries new tokens; with ancestors max_queries is at most 62, max_queries * heads / kv_heads at most 64,
         and there is no window

Safe to capture in a CUDA graph: nothing is read back and grids depend on shapes and max_queries alone, so a replay may
find other numbers in every tensor. A sequence may have no new tokens (padding). Rows of `out` that belong to no
sequence are not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention import prefill_hopper as hopper
from quantkit.kernels.attention.cache import EIGHT_BIT, LARGEST_GROUP, CacheLayout, check_words, layout_of
from quantkit.kernels.attention.decode import launch_decode
from quantkit.kernels.attention.decode_integers import launch_decode_integers, takes
from quantkit.kernels.attention.decode_plan import (
    LARGEST_ROWS,
    MOST_NODES,
    MOST_PROGRAMS_PER_SM,
    DecodeConfig,
    IntegerDecodeConfig,
    Scratch,
    choose_splits,
    decode_config,
    integer_decode_config,
    scratch_needs,
)
from quantkit.kernels.attention.prefill import PrefillConfig, launch_prefill, prefill_config
from quantkit.kernels.attention.prefill_hopper import HopperPrefillConfig
from quantkit.kernels.card import card_of
from quantkit.kernels.checks import (
    HALVES,
    check_contiguous,
    check_dtype,
    check_rows,
    check_same_device,
    check_shape,
)

ROWS_BESIDE_PREFILL = 16  # in a mixed batch, sequences of up to this many rows go through the decode kernel


def make_scratch(
    device: torch.device | str,
    *,
    sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_queries: int = 1,
    config: DecodeConfig | None = None,
) -> Scratch:
    """A scratch that is large enough for every call with at most so many sequences and new tokens."""
    padded_dim = triton.next_power_of_2(head_dim)
    rows = max(min(_compiled_rows(max_queries, heads // kv_heads), LARGEST_ROWS), ROWS_BESIDE_PREFILL)
    per_multiprocessor = MOST_PROGRAMS_PER_SM if config is None else config.programs_per_sm
    return Scratch.allocate(
        device,
        programs=card_of(torch.device(device)).processors * per_multiprocessor,
        rows=rows,
        padded_dim=padded_dim,
        counters=sequences * kv_heads,
    )


def _check_group(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > LARGEST_GROUP:
        raise InputError(
            f"attention: {heads} query heads over {kv_heads} KV heads; query heads must be a multiple of KV heads, "
            f"at most {LARGEST_GROUP} times as many"
        )


def _check_scales(layout: CacheLayout, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    if (k_scale is None) != (v_scale is None):
        raise InputError("attention: k_scale and v_scale must be given together")
    if layout.dtype == EIGHT_BIT and k_scale is None:
        raise InputError(f"attention: a {str(layout.dtype)[6:]} cache needs k_scale and v_scale, one per KV head")
    if layout.codes is not None:
        if k_scale is None or v_scale is None:
            raise InputError(f"attention: a cache of {layout.codes.name} needs k_scale and v_scale, its words")
        check_words("k_scale", k_scale, layout)
        check_words("v_scale", v_scale, layout)
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check_dtype("attention", name, scale, (torch.float32,))
            check_shape("attention", name, scale, (layout.kv_heads,))
            check_contiguous("attention", name, scale)


def _check_batch(page_table: Tensor, context_lengths: Tensor, query_starts: Tensor) -> None:
    check_shape("attention", "page_table", page_table, (None, None))
    check_rows("attention", "page_table", page_table)
    sequences = page_table.shape[0]
    check_shape("attention", "context_lengths", context_lengths, (sequences,))
    check_shape("attention", "query_starts", query_starts, (sequences + 1,))
    for name, tensor in (("context_lengths", context_lengths), ("query_starts", query_starts)):
        check_contiguous("attention", name, tensor)
    named = {"page_table": page_table, "context_lengths": context_lengths, "query_starts": query_starts}
    for name, tensor in named.items():
        check_dtype("attention", name, tensor, (torch.int32,))


def _check_queries(q: Tensor, out: Tensor, layout: CacheLayout) -> None:
    check_dtype("attention", "q", q, HALVES)
    check_shape("attention", "q", q, (None, None, layout.head_dim))
    check_rows("attention", "q", q)
    check_dtype("attention", "out", out, (q.dtype,))
    check_shape("attention", "out", out, tuple(q.shape))
    check_rows("attention", "out", out)
    if layout.dtype != EIGHT_BIT and layout.codes is None:
        check_dtype("attention", "the cache", torch.empty(0, dtype=layout.dtype), (q.dtype,))
    _check_group(q.shape[1], layout.kv_heads)


def _check_options(scale: float, window: int | None, soft_cap: float | None, max_queries: int) -> None:
    if not 0.0 < scale < 1e6:
        raise InputError(f"attention: scale is {scale}, but must be positive")
    if window is not None and window < 1:
        raise InputError(f"attention: window is {window}, but must be 1 or more tokens, or None")
    if soft_cap is not None and not soft_cap > 0.0:
        raise InputError(f"attention: soft_cap is {soft_cap}, but must be positive, or None")
    if max_queries < 1:
        raise InputError(f"attention: max_queries is {max_queries}, but must be 1 or more")


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    check_dtype("attention", "sinks", sinks, (*HALVES, torch.float32))
    check_shape("attention", "sinks", sinks, (q.shape[1],))
    check_contiguous("attention", "sinks", sinks)
    check_same_device("attention", q=q, sinks=sinks)


def _check_ancestors(ancestors: Tensor, q: Tensor, window: int | None, max_queries: int, group: int) -> None:
    check_dtype("attention", "ancestors", ancestors, (torch.int64,))
    check_shape("attention", "ancestors", ancestors, (q.shape[0],))
    check_contiguous("attention", "ancestors", ancestors)
    check_same_device("attention", q=q, ancestors=ancestors)
    if window is not None:
        raise InputError("attention: ancestors cannot be used with a window; leave ancestors or the window out")
    most = min(MOST_NODES, LARGEST_ROWS // group)
    if max_queries > most:
        raise InputError(
            f"attention: max_queries is {max_queries}, but with ancestors and {group} query heads per KV head it must "
            f"be at most {most}; use smaller trees"
        )


def _check_tensors(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> CacheLayout:
    layout = layout_of(cache_k, cache_v, k_scale)
    _check_queries(q, out, layout)
    _check_batch(page_table, context_lengths, query_starts)
    _check_scales(layout, k_scale, v_scale)
    check_same_device("attention", q=q, cache_k=cache_k, cache_v=cache_v, page_table=page_table, out=out)
    check_same_device(
        "attention", q=q, context_lengths=context_lengths, query_starts=query_starts, k_scale=k_scale, v_scale=v_scale
    )
    return layout


@dataclass(frozen=True)
class Plan:
    """Which kernels a call launches: sequences with up to `decode_rows` rows go through the decode kernel."""

    decode_rows: int  # 0: it is not launched
    prefill: bool


def _compiled_rows(max_queries: int, group: int) -> int:
    """The kernel is compiled for a number of rows: that of decoding, or a power of two that the smallest tile fills."""
    return group if max_queries == 1 else max(ROWS_BESIDE_PREFILL, triton.next_power_of_2(max_queries * group))


def plan(tokens: int, sequences: int, max_queries: int, group: int) -> Plan:
    """Rows of a sequence are its new tokens times `group`. A batch of equal prompts needs no decode kernel."""
    if max_queries * group <= LARGEST_ROWS:
        return Plan(decode_rows=_compiled_rows(max_queries, group), prefill=False)
    if tokens >= sequences * max_queries:
        return Plan(decode_rows=0, prefill=True)
    return Plan(decode_rows=max(ROWS_BESIDE_PREFILL, group), prefill=True)


def _check_integers(as_rows: bool) -> None:
    if not as_rows:
        raise InputError(
            "attention: tokens as rows are for caches of integers, one new token a sequence, up to 8 query heads per "
            "KV head and no ancestors; leave `decode` out"
        )


def _scratch_for(given: Scratch | None, device: torch.device, needed: dict[str, int]) -> Scratch:
    if given is None:
        return Scratch.allocate(device, **needed)
    if given.partial.device != device:
        raise InputError(f"attention: the scratch is on {given.partial.device}, but the other tensors are on {device}")
    if not given.holds(**needed):
        wanted = ", ".join(f"{name} {size}" for name, size in needed.items())
        raise InputError(f"attention: the scratch is too small for {wanted}; make it with make_scratch(...)")
    return given


def _counters(scratch: Scratch | None, device: torch.device) -> Tensor:
    """Zeros, and zeros again after the call."""
    if scratch is not None and scratch.tickets.device == device and scratch.tickets.numel() >= hopper.COUNTERS:
        return scratch.tickets
    return torch.zeros(hopper.COUNTERS, dtype=torch.int32, device=device)


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
    soft_cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    max_context: int | None = None,
    splits: int | None = None,
    decode: DecodeConfig | None = None,
    prefill: PrefillConfig | HopperPrefillConfig | None = None,
) -> Tensor:
    """The attention output [tokens, heads, head_dim] of the new tokens; see the top of this file.

    A query sees `window` tokens, itself included; `soft_cap` bounds scores by soft_cap * tanh(score / soft_cap).
    `max_context` bounds context_lengths (default: what the page table holds). `scratch` saves the decode kernel three
    allocations a call. `splits`, `decode` and `prefill` override what is chosen from the shapes.
    """
    out = torch.empty_like(q) if out is None else out
    batch = (page_table, context_lengths, query_starts)
    layout = _check_tensors(q, cache_k, cache_v, *batch, k_scale, v_scale, out)
    _check_options(scale, window, soft_cap, max_queries)
    tokens, heads, _ = q.shape
    group = heads // layout.kv_heads
    if sinks is not None:
        _check_sinks(sinks, q)
    if ancestors is not None:
        _check_ancestors(ancestors, q, window, max_queries, group)
    sequences = page_table.shape[0]
    if tokens == 0 or sequences == 0:
        return out
    cap = None if soft_cap is None else float(soft_cap)
    tensors = (q, out, cache_k, cache_v, *batch, k_scale, v_scale, sinks)
    scalars = (float(scale), cap, window, page_table.stride(0), *q.stride()[:2], *out.stride()[:2])
    chosen = plan(tokens, sequences, max_queries, group)
    if chosen.decode_rows:
        bound = page_table.shape[1] * layout.page_size if max_context is None else max_context
        pairs, card = sequences * layout.kv_heads, card_of(q.device)
        kind = (layout.padded_dim, layout.dtype.itemsize, chosen.decode_rows)
        integers = layout.codes is not None
        as_rows = max_queries == 1 and ancestors is None and takes(layout, chosen.decode_rows)
        if decode is None and as_rows and layout.codes is not None:
            decode = integer_decode_config(layout.padded_dim, layout.codes.bits, pairs)
        config = decode or decode_config(*kind, pairs, card.processors, card, integers=integers)
        parts = splits or choose_splits(pairs, bound, card.processors * config.programs_per_sm, config.block_n)
        needed = scratch_needs(pairs, parts, chosen.decode_rows, layout.padded_dim)
        space = _scratch_for(scratch, q.device, needed)
        cut = (scalars, space, layout, group, chosen.decode_rows, pairs, parts)
        if isinstance(config, IntegerDecodeConfig):
            _check_integers(as_rows)
            launch_decode_integers(tensors, *cut, config)
        else:
            launch_decode((*tensors, ancestors), *cut, config)
    if chosen.prefill:
        caches = (cache_k, cache_v)
        fast = sinks is None and hopper.supports(
            q, caches, layout, window=window, soft_cap=soft_cap, scaled=k_scale is not None
        )
        if prefill is None and fast and max_queries * group >= hopper.FEWEST_ROWS:
            prefill = HopperPrefillConfig()
        bits = 0 if layout.codes is None else layout.codes.bits
        way = prefill or prefill_config(layout.padded_dim, card_of(q.device), bits=bits)
        if isinstance(way, PrefillConfig):
            launch_prefill(tensors, scalars, layout, group, chosen.decode_rows, tokens, sequences, way)
        elif fast:
            where = (_counters(scratch, q.device), float(scale), layout, chosen.decode_rows)
            hopper.launch_hopper_prefill(q, out, caches, batch, *where, card_of(q.device).processors, way)
        else:
            raise InputError("attention: the Hopper kernel does not take this batch; leave `prefill` out")
    return out
