"""The warp of the Hopper prefill kernel that fetches: queries, keys and values of one item after the other.

Programs stay: each takes the next item from a counter, and fetches for it while the other warps finish the one before.
Items come in the order of `prefill.py`: a sequence's last tokens first, all its tiles together.

Keys come by bulk copies of BOX rows: a page, or a part of one. Rows past the context may hold anything, and even with a
weight of zero a NaN would spoil the sum. The box at the end of a context is therefore fetched from so much further down
that its last row is the last token; what comes before the page is then zero, by the rules of the copy. `key_numbers`
tells the mask. Boxes past the context are fetched from a negative page: zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since Triton 3.7
TOKEN, LEFT, EARLIEST, CONTEXT, HEAD = (gl.constexpr(field) for field in range(5))  # what a note says of an item
_NOWHERE = gl.constexpr(2**30)


@gluon.jit
def key_numbers(start, context, BOX: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    """Which token each column of the tile at `start` is, where the end of the context may be in the tile."""
    token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    last = context // BOX * BOX
    moved = token - (BOX - context % BOX)
    return gl.where(token < last, token, gl.where(moved < last, _NOWHERE, moved))


@gluon.jit
def _find(starts, contexts, item, sequences, TILES: gl.constexpr, TOKENS: gl.constexpr, SKIP: gl.constexpr):
    """Of an item: its sequence, first token, tokens from there on (0: nothing to do), position of the first, context.

    As `tiles.find_sequence`.
    """
    lanes: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    slot = item // TILES
    before = 0
    for base in range(0, sequences, 256):
        numbers = base + gl.arange(0, 256, layout=lanes)
        first = gl.load(starts + numbers, mask=numbers < sequences, other=0)
        before += gl.sum(((first // TOKENS + numbers <= slot) & (numbers < sequences)).to(gl.int32), 0)
    sequence = before - 1
    first = gl.load(starts + sequence)
    new = gl.load(starts + sequence + 1) - first
    context = gl.load(contexts + sequence)
    tiles = (new + TOKENS - 1) // TOKENS
    number = slot - (first // TOKENS + sequence)
    query = (tiles - 1 - number) * TOKENS
    left = gl.where((number < tiles) & (new > SKIP), new - query, 0)
    return sequence, first + query, left, context - new + query, context


@gluon.jit
def _load_pages(table, start, context, PAGE: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr):
    """The page of each box of a tile; -1 past the context."""
    found = ()
    for box in gl.static_range(BOXES):
        token = start + box * BOX
        found += (gl.load(table + token // PAGE, mask=token < context, other=-1),)  # type: ignore[assignment]
    return found


@gluon.jit
def _fetch(cache, boxes, full, empty, step, pages, start, context, head, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
           STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    """One tile of keys or values, as soon as its place is free. A row of 128 is two halves, as wgmma wants them."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BOXES * BOX * HALVES * 128)
    for box in gl.static_range(BOXES):
        token = start + box * BOX
        row = token % PAGE - gl.maximum(token + BOX - context, 0)
        for half in gl.static_range(HALVES):
            place = boxes.index((stage * HALVES + half) * BOXES + box)
            tma.async_copy_global_to_shared(cache, [pages[box] * KV_HEADS + head, row, half * 64], full.index(stage),
                                            place)  # fmt: skip


@gluon.jit
def _fetch_queries(q, boxes, full, token, head, stage, PACK: gl.constexpr, HALVES: gl.constexpr):
    """64 rows for each group of warps. Rows past the sequence are another's: computed, and not stored."""
    mbarrier.expect(full.index(stage), 2 * HALVES * 64 * 128)
    for part in gl.static_range(2):
        for half in gl.static_range(HALVES):
            place = boxes.index((stage * 2 + part) * HALVES + half)
            tma.async_copy_global_to_shared(q, [token + part * (64 // PACK), head, half * 64], full.index(stage), place)


@gluon.jit
def _leave(counter, programs):
    """Who stops last leaves the counters as they were."""
    if gl.atomic_add(counter + 1, 1) == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def fetch_items(q, cache_k, cache_v, q_smem, k_smem, v_smem, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                page_table, contexts, starts, counter, table_stride, sequences, items, programs, HEADS: gl.constexpr,
                KV_HEADS: gl.constexpr, PAGE: gl.constexpr, PACK: gl.constexpr, SKIP: gl.constexpr,
                STAGES: gl.constexpr, Q_STAGES: gl.constexpr):  # fmt: skip
    """As far ahead as there is room. An item is announced by a note; the last note has no rows left."""
    TOKENS: gl.constexpr = 128 // PACK
    TILES: gl.constexpr = HEADS // PACK
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HALVES: gl.constexpr = k_smem.shape[2] // 64
    BOX: gl.constexpr = cache_k.block_shape[1]
    BOXES: gl.constexpr = BLOCK_N // BOX
    q_boxes = q_smem._reinterpret(q.dtype, [Q_STAGES * 2 * HALVES, 64 // PACK, PACK, 64], q.layout)
    k_boxes = k_smem._reinterpret(q.dtype, [STAGES * HALVES * BOXES, 1, BOX, 64], cache_k.layout)
    v_boxes = v_smem._reinterpret(q.dtype, [STAGES * HALVES * BOXES, 1, BOX, 64], cache_v.layout)
    field = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [1], [0]))
    step = 0
    turn = 0
    item = gl.program_id(0)
    sequence, token, left, earliest, context = _find(starts, contexts, item, sequences, TILES, TOKENS, SKIP)
    while item < items:
        following = gl.atomic_add(counter, 1) + programs  # known before this item is done, so that no warp waits
        found = _find(starts, contexts, gl.minimum(following, items - 1), sequences, TILES, TOKENS, SKIP)
        if left > 0:
            stage = turn % Q_STAGES
            head = item % TILES * PACK
            mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
            note = gl.where(field == TOKEN, token, gl.where(field == LEFT, left, head))
            note = gl.where(field == EARLIEST, earliest, gl.where(field == CONTEXT, context, note))
            notes.index(stage).store(note)
            barrier()
            _fetch_queries(q, q_boxes, q_full, token, head, stage, PACK, HALVES)
            turn += 1
            table = page_table + sequence.to(gl.int64) * table_stride
            kv_head = head // (HEADS // KV_HEADS)
            tiles = (gl.minimum(earliest + TOKENS, context) + BLOCK_N - 1) // BLOCK_N
            pages = _load_pages(table, (tiles - 1) * BLOCK_N, context, PAGE, BOX, BOXES)
            for past in range(tiles):
                start = (tiles - 1 - past) * BLOCK_N
                pages_next = _load_pages(table, gl.maximum(start - BLOCK_N, 0), context, PAGE, BOX, BOXES)
                _fetch(cache_k, k_boxes, k_full, k_empty, step, pages, start, context, kv_head, KV_HEADS, PAGE, STAGES,
                       BOX, BOXES, HALVES)  # fmt: skip
                _fetch(cache_v, v_boxes, v_full, v_empty, step, pages, start, context, kv_head, KV_HEADS, PAGE, STAGES,
                       BOX, BOXES, HALVES)  # fmt: skip
                pages = pages_next
                step += 1
        item = following
        sequence, token, left, earliest, context = found
    stage = turn % Q_STAGES
    mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
    notes.index(stage).store(gl.zeros((8,), gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    barrier()
    mbarrier.arrive(q_full.index(stage), count=1)
    _leave(counter, programs)
