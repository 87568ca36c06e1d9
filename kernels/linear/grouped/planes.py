"""Inside a kernel: one chunk of a plane of packed weights, codes and scales, as for a weight that stands alone."""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.linear.weight_only.unpack import decode_slabs, load_offset, load_scales, load_zeros


@triton.jit
def decode_plane(
    words,
    high,
    zeros,
    table,
    plane,
    chunk,
    row,
    rows,
    words_of_plane,
    zeros_of_plane,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The slabs of one chunk of a plane, as `decode_slabs` gives them."""
    begin = plane.to(tl.int64) * words_of_plane
    place = (chunk * rows + row[:, None]) * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(words + begin + place, eviction_policy="evict_first")
    above = packed
    if KIND == "int3" or KIND == "int8":
        above = tl.load(high + begin + place, eviction_policy="evict_first")
    if HAS_ZEROS:
        zeros += plane.to(tl.int64) * zeros_of_plane
    origins = load_zeros(zeros, chunk, row, rows, GROUP, ONE_GROUP, HAS_ZEROS)
    return decode_slabs(packed, above, origins, table, KIND, MIDDLE, DTYPE, ASM, CONSTRAINTS, INTERPRET)


@triton.jit
def scales_of_plane(
    stored,
    nested_table,
    nested_scales,
    nested_offsets,
    plane,
    chunk,
    row,
    first_row,
    rows,
    groups,
    stored_of_plane,
    second_of_plane,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """The scales of one chunk of a plane, as `load_scales` gives them."""
    offset = 0.0
    if NESTED_EVERY > 0:
        offset = load_offset(nested_offsets + plane * (rows // 128), first_row, OUTPUTS, NESTED_EVERY)
        nested_scales += plane.to(tl.int64) * second_of_plane
    return load_scales(stored + plane.to(tl.int64) * stored_of_plane, nested_table, nested_scales, offset, chunk, row,
                       rows, groups, GROUP, ONE_GROUP, NESTED_EVERY)  # fmt: skip
