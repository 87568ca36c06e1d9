"""Attention of many new tokens on Hopper: one warp fetches keys and values, two groups of warps multiply in turn.

Layout   as `prefill.py`
Meaning  `reference.attention.attend`
Limits   `supports`. Triton's interpreter does not know Gluon: this kernel is tested on a GPU only, and `prefill.py`
         stands in elsewhere

An item of work is 128 rows: 128 // PACK neighbouring new tokens of one sequence times PACK query heads of one KV head.
`hopper_fetch.py` is what the one warp does, `hopper_multiply.py` what the groups do with 64 rows each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.hopper_fetch import barrier, fetch_items
from quantkit.kernels.attention.hopper_multiply import attend_items
from quantkit.kernels.card import card_of

COUNTERS = 2  # int32, zero between calls
FEWEST_ROWS = 1024  # new tokens of the longest sequence times query heads per KV head; `prefill.py` is faster below
_BOX = gl.NVMMASharedLayout(128, 16, rank=3)  # how a copy of rows of 64 lies in shared memory


@dataclass(frozen=True)
class HopperPrefillConfig:
    """Keys of a tile, and how many tiles of keys (2 or more) and of queries are on their way or in use."""

    block_n: int = 128
    stages: int = 2
    query_stages: int = 2
    registers: int = 224  # of a thread that multiplies; the one warp gets 504 - 2 * registers


@gluon.jit(do_not_specialize=("table_stride", "sequences", "items", "programs"))
def _hopper_prefill(q, cache_k, cache_v, out, page_table, contexts, starts, counter, scale, table_stride, out_token,
                    out_head, sequences, items, programs, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
                    DIM: gl.constexpr, PAGE: gl.constexpr, PACK: gl.constexpr, SKIP: gl.constexpr,
                    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                    REGISTERS: gl.constexpr):  # fmt: skip
    BOX: gl.constexpr = cache_k.block_shape[1]
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    signal: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(q.dtype, [Q_STAGES * 2, 64, DIM], tile)
    k_smem = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, DIM], tile)
    v_smem = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, DIM], tile)
    notes = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], signal)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], signal)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], signal)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], signal)
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)  # both groups have read it
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (attend_items, (q_smem, k_smem, v_smem, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, out,
                        scale, out_token, out_head, 0, PACK, BOX, STAGES, Q_STAGES)),
        (attend_items, (q_smem, k_smem, v_smem, notes, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, out,
                        scale, out_token, out_head, 1, PACK, BOX, STAGES, Q_STAGES)),
        (fetch_items, (q, cache_k, cache_v, q_smem, k_smem, v_smem, notes, q_full, q_empty, k_full, k_empty, v_full,
                       v_empty, page_table, contexts, starts, counter, table_stride, sequences, items, programs, HEADS,
                       KV_HEADS, PAGE, PACK, SKIP, STAGES, Q_STAGES)),
    ], [4, 1], [REGISTERS, 504 - 2 * REGISTERS])  # fmt: skip


def supports(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    layout: CacheLayout,
    *,
    window: int | None,
    soft_cap: float | None,
    scaled: bool,
) -> bool:
    """Whether this kernel takes the batch: Hopper (wgmma is gone from the chips after it), head_dim 64 or 128, a 16-bit
    cache without scales, every key before a query seen as it is, and all of it where the copy engine can fetch it.
    """
    return (
        card_of(q.device).has_warpgroups
        and layout.head_dim in (64, 128)
        and layout.dtype == q.dtype
        and not scaled
        and window is None
        and soft_cap is None
        and all(tensor.data_ptr() % 16 == 0 for tensor in (q, *cache))
        and all(stride > 0 and stride % 8 == 0 for stride in q.stride()[:2])
    )


def heads_together(group: int) -> int:
    """How many query heads of a KV head share a tile: a power of two that divides their number."""
    return min(group & -group, 64)


def launch_hopper_prefill(
    q: Tensor,
    out: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    counters: Tensor,
    scale: float,
    layout: CacheLayout,
    skip_rows: int,
    processors: int,
    config: HopperPrefillConfig,
) -> None:
    """Launches what `attend` has checked and `supports` takes; `batch` is page table, contexts and query starts."""
    tokens, heads, dim = q.shape
    group = heads // layout.kv_heads
    pack = heads_together(group)
    box = min(layout.page_size, config.block_n)
    sequences = batch[0].shape[0]
    items = (tokens // (128 // pack) + sequences) * (heads // pack)  # see tiles.find_sequence
    programs = min(items, processors)
    rows = [layout.pages * layout.kv_heads, layout.page_size, dim]
    _hopper_prefill[(programs,)](
        TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // pack, pack, 64], _BOX),
        *(TensorDescriptor(part, rows, [layout.page_size * dim, dim, 1], [1, box, 64], _BOX) for part in cache),
        out,
        *batch,
        counters,
        scale,
        batch[0].stride(0),
        *out.stride()[:2],
        sequences,
        items,
        programs,
        HEADS=heads,
        KV_HEADS=layout.kv_heads,
        DIM=dim,
        PAGE=layout.page_size,
        PACK=pack,
        SKIP=skip_rows // group,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        Q_STAGES=config.query_stages,
        REGISTERS=config.registers,
        num_warps=4,
    )
