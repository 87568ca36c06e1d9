"""The two groups of warps of the Hopper prefill kernel that multiply; see `prefill_hopper.py`.

A group has 64 rows of an item. It asks for the scores of one tile of keys and for the sum over the values of the tile
before, and weighs the scores while that sum is made; meanwhile the other group's products run. Tiles of keys are taken
from the last to the first, so that those that need a mask come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quantkit.kernels.attention.hopper_fetch import (
    CONTEXT,
    EARLIEST,
    HEAD,
    LEFT,
    TOKEN,
    barrier,
    key_numbers,
)

_LOG2_E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-1.0e30)  # instead of -inf, so that the difference of two of them is a number


@gluon.jit
def _weigh(scores, top, total, steep):
    """Weights of a tile's keys, the new `top` and `total`, and by what earlier weights shrink."""
    highest = gl.maximum(top, gl.max(scores, 1))
    shrink = gl.exp2((top - highest) * steep)
    weight = gl.exp2(scores * steep - (highest * steep)[:, None])
    return weight, highest, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _give_back(empty):
    barrier()  # all four warps are done with it
    mbarrier.arrive(empty, count=1)


@gluon.jit
def _score(queries, k_smem, stage, SCORES: gl.constexpr):
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    nothing = gl.zeros((64, BLOCK_N), gl.float32, layout=SCORES)
    return warpgroup_mma(queries, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _advance(queries, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, step, asked, more, limit, weight, acc,
             top, total, steep, MASKED: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
             SCORES: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Scores and weights of tile `step`, which has arrived, and the sum over the values of the tile before.

    Row r sees columns up to limit[r], if MASKED. `more`: another tile follows.
    """
    stage = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(turns.index(PART), (asked & 1) ^ (1 - PART))
    scores = _score(queries, k_smem, stage, SCORES)
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma(weight, v_smem.index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - PART), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    _give_back(k_empty.index(stage))
    if MASKED:
        column = gl.arange(0, k_smem.shape[1], layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(column[None, :] <= limit[:, None], scores, float("-inf"))
    heavy, top, total, shrink = _weigh(scores, top, total, steep)
    heavy = gl.convert_layout(heavy.to(k_smem.dtype), gl.DotOperandLayout(0, SUMS, 2))
    # The wait for the next tile stands here, since ptxas moves all of the weighing behind a wait for products that
    # follows it directly; it does not move it past a branch.
    mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=more)
    acc, weight, heavy = warpgroup_mma_wait(0, deps=(acc, weight, heavy))
    _give_back(v_empty.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    return heavy, acc, top, total


@gluon.jit
def _read(notes, stage, full, turn, Q_STAGES: gl.constexpr):
    """The note of the next item, once it is there."""
    mbarrier.wait(full.index(stage), (turn // Q_STAGES) & 1)
    return notes.index(stage).load(gl.BlockedLayout([8], [32], [4], [0]))


@gluon.jit
def _field(note, field: gl.constexpr):
    number = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [4], [0]))
    return gl.sum(gl.where(number == field, note, 0), 0)


@gluon.jit
def _store(out, result, token, left, head, out_token, out_head, PACK: gl.constexpr):
    """Row r is query head head + r % PACK of token `token` + r // PACK, of which there are `left`."""
    DIM: gl.constexpr = result.shape[1]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, result.type.layout))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, result.type.layout))
    place = (token + row // PACK).to(gl.int64) * out_token.to(gl.uint32) + (head + row % PACK) * out_head
    gl.store(out + place[:, None] + column[None, :], result, mask=(row // PACK < left)[:, None])


@gluon.jit
def attend_items(q_smem, k_smem, v_smem, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, out, scale,
                 out_token, out_head, PART: gl.constexpr, PACK: gl.constexpr, BOX: gl.constexpr,
                 STAGES: gl.constexpr, Q_STAGES: gl.constexpr):  # fmt: skip
    """64 rows of every item: those of PART."""
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    DIM: gl.constexpr = k_smem.shape[2]
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    steep = scale * _LOG2_E
    step = 0
    turn = 0
    note = _read(notes, 0, q_full, 0, Q_STAGES)
    while _field(note, LEFT) > 0:
        earliest = _field(note, EARLIEST)
        context = _field(note, CONTEXT)
        queries = q_smem.index(turn % Q_STAGES * 2 + PART)
        position = earliest + (PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_in))) // PACK
        tiles = (gl.minimum(earliest + 128 // PACK, context) + BLOCK_N - 1) // BLOCK_N
        clear = gl.minimum((earliest + 1) // BLOCK_N, tiles - 1)  # so many need no mask
        start = (tiles - 1) * BLOCK_N

        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
        scores = warpgroup_mma_wait(0, deps=(_score(queries, k_smem, step % STAGES, scores_in),))
        _give_back(k_empty.index(step % STAGES))
        if start + BLOCK_N <= context:
            column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores_in))
            scores = gl.where(column[None, :] <= (position - start)[:, None], scores, float("-inf"))
        else:  # the end of the context is in the last tile or behind it
            keys = key_numbers(start, context, BOX, BLOCK_N, scores_in)
            scores = gl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
        acc = gl.zeros((64, DIM), gl.float32, layout=sums_in)
        top = gl.full((64,), _LOWEST, gl.float32, layout=gl.SliceLayout(1, scores_in))
        total = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(1, scores_in))
        weight, top, total, _ = _weigh(scores, top, total, steep)
        weight = gl.convert_layout(weight.to(k_smem.dtype), gl.DotOperandLayout(0, sums_in, 2))
        step += 1
        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1, pred=tiles > 1)
        for past in range(1, tiles - clear):
            weight, acc, top, total = _advance(
                queries, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, step, step - 1 - turn,
                past + 1 < tiles, position - (start - past * BLOCK_N), weight, acc, top, total, steep, True, PART,
                STAGES, scores_in, sums_in)  # fmt: skip
            step += 1
        for past in range(clear):
            weight, acc, top, total = _advance(
                queries, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turns, step, step - 1 - turn,
                past + 1 < clear, position, weight, acc, top, total, steep, False, PART,
                STAGES, scores_in, sums_in)  # fmt: skip
            step += 1
        token = _field(note, TOKEN)
        left = _field(note, LEFT)
        head = _field(note, HEAD)
        q_stage = turn % Q_STAGES
        turn += 1
        stage = (step - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(weight, v_smem.index(stage), acc, is_async=True)
        acc, weight = warpgroup_mma_wait(0, deps=(acc, weight))
        _give_back(v_empty.index(stage))

        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, sums_in))[:, None]
        result = acc.to(k_smem.dtype)
        # By way of the queries' place, so that a warp writes whole lines of memory.
        queries.store(result)
        barrier()
        result = queries.load(gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0]))
        fence_async_shared()
        _give_back(q_empty.index(q_stage))
        _store(out, result, token + PART * (64 // PACK), left - PART * (64 // PACK), head, out_token, out_head, PACK)
        note = _read(notes, turn % Q_STAGES, q_full, turn, Q_STAGES)
