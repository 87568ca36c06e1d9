"""The Gluon kernel behind `hopper.py`: groups of warps that decode and multiply in turns, and one warp that fetches.

Rows of a product are permuted, so that a thread holds two neighbouring outputs: row 16 w + 8 h + g of a group's 64 is
output 16 w + 2 g + h. Stores of y then fill whole sectors of 32 bytes, and nothing is moved between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quantkit.kernels.chain import wait_for_last
from quantkit.kernels.linear.weight_only.hopper_shares import (
    add_parts,
    barrier,
    begin_of,
    flat,
    in_order,
    next_place,
    place_of,
    program_of,
    started_before,
    store_part,
)
from quantkit.kernels.linear.weight_only.hopper_unpack import decode, finish_scales, load_words, prefetch


@gluon.jit
def _first_row(down, rows, NUMBER: gl.constexpr, GROUPS: gl.constexpr):
    """Where the outputs of a group begin; one that has none left decodes the last ones again."""
    return min((down * GROUPS + NUMBER) * 64, rows - 64)


@gluon.jit
def _consume(
    NUMBER: gl.constexpr,
    shared,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NESTED_EVERY: gl.constexpr,
    WHOLE_CHUNKS: gl.constexpr,
    ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    STORED: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """64 outputs of every tile: decode a chunk, multiply it; words are loaded AHEAD (1 or 2) chunks before."""
    (x_smem, x_full, x_empty, words, high, scales, zeros, nested_table, nested_scales, nested_offsets, bias, y, parts,
     flags, program, per, extra, tokens, outputs, rows, chunks, groups, token_tiles, y_stride) = shared  # fmt: skip
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
    row = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    lane = row[:, None] * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, operand))[None, :]

    unit = begin_of(program, per, extra)
    end = begin_of(program + 1, per, extra)
    chunk, across, down = place_of(unit, chunks, token_tiles)

    # low, above, factors, origins: the chunk that is decoded next. late_*: the one that was loaded last
    late_chunk, late_across, late_down = chunk, across, down
    late_row = _first_row(late_down, rows, NUMBER, GROUPS)
    low, above, factors, origins = load_words(words, high, scales, zeros, late_chunk, late_row, row, lane, rows, KIND,
                                              GROUP, ONE_GROUP, HAS_ZEROS)  # fmt: skip
    factors = finish_scales(factors, nested_table, nested_scales, nested_offsets, late_chunk, late_row, row, groups,
                            GROUP, ONE_GROUP, NESTED_EVERY, WHOLE_CHUNKS)  # fmt: skip
    if AHEAD == 2:
        if unit + 1 < end:
            late_chunk, late_across, late_down = next_place(chunk, across, down, chunks, token_tiles)
        late_row = _first_row(late_down, rows, NUMBER, GROUPS)
        late_low, late_above, late_factors, late_origins = load_words(
            words, high, scales, zeros, late_chunk, late_row, row, lane, rows, KIND, GROUP, ONE_GROUP, HAS_ZEROS
        )
    step = 0
    while unit < end:
        stop = min(chunks, chunk + end - unit)
        acc = warpgroup_mma_init(gl.zeros((64, TOKENS), gl.float32, layout=product))
        for _ in range(chunk, stop):
            weight = decode(low, above, origins, factors, KIND, DTYPE, ASM, CONSTRAINTS, operand)
            if AHEAD == 2:
                low, above, raw, origins = late_low, late_above, late_factors, late_origins
                raw_chunk, raw_row = late_chunk, late_row
            if unit + AHEAD < end:
                late_chunk, late_across, late_down = next_place(late_chunk, late_across, late_down, chunks, token_tiles)
            late_row = _first_row(late_down, rows, NUMBER, GROUPS)
            late_low, late_above, late_factors, late_origins = load_words(
                words, high, scales, zeros, late_chunk, late_row, row, lane, rows, KIND, GROUP, ONE_GROUP, HAS_ZEROS
            )
            if AHEAD == 1:
                low, above, raw, origins = late_low, late_above, late_factors, late_origins
                raw_chunk, raw_row = late_chunk, late_row
            stage = step % STAGES
            mbarrier.wait(x_full.index(stage), (step // STAGES) & 1)
            acc = warpgroup_mma(weight, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
            factors = finish_scales(raw, nested_table, nested_scales, nested_offsets, raw_chunk, raw_row, row, groups,
                                    GROUP, ONE_GROUP, NESTED_EVERY, WHOLE_CHUNKS)  # fmt: skip
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weight))[0]
            acc = warpgroup_mma_init(acc)
            barrier()  # all four warps are done with this stage
            mbarrier.arrive(x_empty.index(stage), count=1)
            step += 1
            unit += 1
        total = flat(warpgroup_mma_wait(num_outstanding=0, deps=(acc,)), TOKENS)
        tile = down * token_tiles + across
        mine = parts + (program * GROUPS + NUMBER).to(gl.int64) * (64 * TOKENS)
        if chunk > 0:
            finisher = program_of(tile * chunks, per, extra)
            store_part(total, mine, flags + finisher * GROUPS + NUMBER, TOKENS)
        else:
            if stop < chunks:
                others = program_of((tile + 1) * chunks - 1, per, extra) - program
                total = add_parts(total, mine, flags + program * GROUPS + NUMBER, others, GROUPS * 64 * TOKENS, TOKENS)
            result = in_order(total, STORED, TOKENS)
            output = (down * GROUPS + NUMBER) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
            token = across * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORED))
            if HAS_BIAS:
                result += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[:, None]
            gl.store(
                y + token[None, :] * y_stride + output[:, None],
                result.to(DTYPE),
                mask=(token < tokens)[None, :] & (output < outputs)[:, None],
            )
        chunk, across, down = next_place(chunks - 1, across, down, chunks, token_tiles)


@gluon.jit
def _produce(
    x,
    shared,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Chunks of x to shared memory, STAGES ahead, and the weight to the second-level cache, PREFETCH ahead."""
    x_smem, x_full, x_empty, words, high, scales, zeros, program, per, extra, rows, chunks, token_tiles = shared
    unit = begin_of(program, per, extra)
    count = begin_of(program + 1, per, extra) - unit
    chunk, across, down = place_of(unit, chunks, token_tiles)
    late_chunk, late_across, late_down = chunk, across, down
    for step in range(-PREFETCH, count):
        if step >= 0:
            stage = step % STAGES
            mbarrier.wait(x_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(x_full.index(stage), TOKENS * 128 * 2)
            tma.async_copy_global_to_shared(x, [across * TOKENS, chunk * 128], x_full.index(stage), x_smem.index(stage))
            chunk, across, down = next_place(chunk, across, down, chunks, token_tiles)
        if PREFETCH > 0:
            if step + PREFETCH < count:
                prefetch(words, high, scales, zeros, late_chunk, late_down, rows, KIND, GROUP, ONE_GROUP, HAS_ZEROS,
                         GROUPS)  # fmt: skip
            late_chunk, late_across, late_down = next_place(late_chunk, late_across, late_down, chunks, token_tiles)


@gluon.jit(do_not_specialize=("per", "extra", "tokens", "chunks", "token_tiles"))
def hopper_kernel(
    x,
    words,
    high,
    scales,
    zeros,
    nested_table,
    nested_scales,
    nested_offsets,
    bias,
    y,
    parts,
    flags,
    per,
    extra,
    tokens,
    outputs,
    rows,
    chunks,
    groups,
    token_tiles,
    y_stride,
    COUNTER: gl.constexpr,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NESTED_EVERY: gl.constexpr,
    WHOLE_CHUNKS: gl.constexpr,
    ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    STORED: gl.constexpr,
    AHEAD: gl.constexpr,
    PREFETCH: gl.constexpr,
    PAIRS: gl.constexpr,
    REGISTERS: gl.constexpr,
    CHAINED: gl.constexpr,
):
    """`GROUPS` (2 or 3) groups of four warps share a tile; `hopper_shares.py` says which chunks a program has."""
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, 128], x.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(x_empty.index(stage), count=GROUPS)  # all groups have read it
    fence_async_shared()
    if PAIRS != "":
        gl.inline_asm_elementwise(PAIRS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    wait_for_last(CHAINED)
    before = gl.program_id(0) if COUNTER < 0 else started_before(flags + COUNTER)
    program = gl.num_programs(0) - 1 - before  # those that are waited for start first
    barrier()
    shared = (x_smem, x_full, x_empty, words, high, scales, zeros, nested_table, nested_scales, nested_offsets, bias, y,
              parts, flags, program, per, extra, tokens, outputs, rows, chunks, groups, token_tiles,
              y_stride)  # fmt: skip
    fetched = (x_smem, x_full, x_empty, words, high, scales, zeros, program, per, extra, rows, chunks, token_tiles)
    if GROUPS == 2:
        gl.warp_specialize([
            (_consume, (0, shared, KIND, GROUP, ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, WHOLE_CHUNKS, ASM,
                        CONSTRAINTS, DTYPE, TOKENS, STAGES, GROUPS, STORED, AHEAD)),
            (_consume, (1, shared, KIND, GROUP, ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, WHOLE_CHUNKS, ASM,
                        CONSTRAINTS, DTYPE, TOKENS, STAGES, GROUPS, STORED, AHEAD)),
            (_produce, (x, fetched, KIND, GROUP, ONE_GROUP, HAS_ZEROS, TOKENS, STAGES, GROUPS, PREFETCH)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, shared, KIND, GROUP, ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, WHOLE_CHUNKS, ASM,
                        CONSTRAINTS, DTYPE, TOKENS, STAGES, GROUPS, STORED, AHEAD)),
            (_consume, (1, shared, KIND, GROUP, ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, WHOLE_CHUNKS, ASM,
                        CONSTRAINTS, DTYPE, TOKENS, STAGES, GROUPS, STORED, AHEAD)),
            (_consume, (2, shared, KIND, GROUP, ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, WHOLE_CHUNKS, ASM,
                        CONSTRAINTS, DTYPE, TOKENS, STAGES, GROUPS, STORED, AHEAD)),
            (_produce, (x, fetched, KIND, GROUP, ONE_GROUP, HAS_ZEROS, TOKENS, STAGES, GROUPS, PREFETCH)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
