"""Weight-only matmul for many tokens on Hopper: one group of warps decodes while another multiplies.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous and 16-byte aligned; weight as in `weight.py`
Meaning  `reference.linear.linear`: y = x @ dequantize(weight).T + bias, accumulated in float32, weights rounded to x's
         dtype as a decoded weight would be
Limits   compute capability 9.0; Triton 3.6 or newer, whose Gluon language gives a kernel its warp groups. Triton's
         interpreter does not know Gluon: this kernel is tested on a GPU only, and `dequantize.py` stands in elsewhere

A warp that issues wgmma waits until the tensor core takes it, and cannot decode meanwhile: decoding and multiplying in
the same warps takes the sum of both times. Here two or three groups of four warps share a tile of x and have 64 outputs
each; while the products of one run, the others decode their next chunk in registers. One more warp fetches x, and asks
for the words of the weight some chunks before they are loaded. W4, 28,672 by 4,096 at 1,024 tokens on an H200: the same
warps for both 371 us, four warps of their own for decoding 467, two groups 347; cuBLAS with a bfloat16 weight 311.
`hopper_shares.py` says who does what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantkit.errors import InputError
from quantkit.kernels.card import card_of
from quantkit.kernels.chain import chained
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.weight import CHUNK, TICKETS, Kernel
from quantkit.kernels.linear.weight_only.assembly import PTX, assembly, pair_table
from quantkit.kernels.linear.weight_only.hopper_kernel import hopper_kernel
from quantkit.kernels.linear.weight_only.hopper_shares import shares
from quantkit.kernels.linear.weight_only.weight import PackedWeight

NAME = "Hopper matmul"
PREFETCH = 4  # chunks between asking for words and loading them
COPIES = 32  # of the table of pairs (nf4, fp4): one for each lane
_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_REGISTERS = {2: 232, 3: 168}  # of every group but the first, which takes what is left
_AHEAD, _AHEAD_OF_TABLES = 1, 2  # chunks before their turn words are loaded to registers: a table's scales come late


@dataclass(frozen=True)
class HopperConfig:
    """How a product is cut.

    tokens   of a tile: 64, 128 or 256
    stages   chunks of x that are on their way
    splits   how many programs a tile has on average; 0: one program for every multiprocessor, with equal shares
    outputs  of a tile: 64 for each of 2 or 3 groups of warps; 192 with up to 128 tokens
    """

    tokens: int = 256
    stages: int = 3
    splits: int = 1
    outputs: int = 128


def supports(weight: PackedWeight) -> bool:
    """Hopper only: wgmma is gone from the chips after it."""
    return card_of(weight.device).has_warpgroups


def matmul(
    x: Tensor, weight: PackedWeight, config: HopperConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    check_arguments(NAME, x, weight, bias, out)
    if not supports(weight):
        raise InputError(f"{NAME}: needs a GPU of compute capability 9.0, the weight is on {weight.device}")
    if config.outputs // 64 not in _REGISTERS or config.outputs % 64:
        raise InputError(f"{NAME}: tiles have 128 or 192 outputs, not {config.outputs}")
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if x.shape[0] == 0:
        return y
    if x.shape[0] * y.stride(0) >= 1 << 31:
        raise InputError(
            f"{NAME}: {x.shape[0]} tokens of {y.stride(0)} are too many for 32-bit places; decode the weight"
        )
    x = _aligned(x)
    dtype, groups = _GLUON[x.dtype], config.outputs // 64
    token_tiles = triton.cdiv(x.shape[0], config.tokens)
    tiles = token_tiles * triton.cdiv(weight.outputs, config.outputs)
    share = shares(tiles, weight.chunks, config.splits, card_of(x.device).processors)
    if share.cut and share.programs * groups >= TICKETS:  # the last ticket counts the programs that have started
        raise InputError(f"{NAME}: {share.programs} programs share tiles, but at most {(TICKETS - 1) // groups} can")
    parts = share.programs * config.outputs * config.tokens if share.cut else 0
    copies = 0 if weight.table is None else COPIES
    text, constraints = assembly(weight.code_type, PTX[x.dtype], weight.table_values, weight.zero_points, copies)
    layout = gl.NVMMASharedLayout.get_default_for([config.tokens, CHUNK], dtype)
    nested, absent = weight.nested, weight.words
    hopper_kernel[(share.programs,)](
        TensorDescriptor.from_tensor(x, [config.tokens, CHUNK], layout),
        weight.words,
        absent if weight.high is None else weight.high,
        nested.codes if nested else weight.scales,
        absent if weight.zeros is None else weight.zeros,
        nested.table if nested else absent,
        nested.scales if nested else absent,
        nested.offsets if nested else absent,
        absent if bias is None else bias,
        y,
        torch.empty(parts, dtype=torch.float32, device=x.device),
        weight.tickets,
        share.per,
        share.extra,
        x.shape[0],
        weight.outputs,
        weight.rows,
        weight.chunks,
        1 if weight.one_group else weight.inputs // weight.group,
        token_tiles,
        y.stride(0),
        COUNTER=TICKETS - 1 if share.cut else -1,
        **weight.constants(),
        WHOLE_CHUNKS=weight.inputs % CHUNK == 0,
        HAS_BIAS=bias is not None,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=dtype,
        TOKENS=config.tokens,
        STAGES=config.stages,
        GROUPS=groups,
        STORED=_stored(config.tokens),
        AHEAD=_AHEAD_OF_TABLES if copies else _AHEAD,
        PREFETCH=PREFETCH,
        PAIRS=table_text(PTX[x.dtype], weight.table_values, copies) if copies else "",
        REGISTERS=_REGISTERS[groups],
        **chained(x.device),
        num_warps=4,
    )
    return y


@cache
def table_text(dtype: str, table: tuple[float, ...], copies: int) -> str:
    """`pair_table` for the four warps that run before all others, which must not wait for those: without its barrier.

    The kernel's own barrier follows.
    """
    lines = pair_table(dtype, table, copies, 128).splitlines()
    return "\n".join(line for line in lines if not line.startswith("bar")) + "\n"


@cache
def _stored(tokens: int) -> gl.DistributedLinearLayout:
    """Which thread holds what of a product [64 outputs, tokens], its rows in the order of `in_order`."""
    registers = [[1, 0], [0, 1]] + [[0, 1 << bit] for bit in range(3, tokens.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, tokens])


def _aligned(x: Tensor) -> Tensor:
    """Rows that the copy engine can take: they begin at multiples of 16 bytes."""
    if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    whole = x.new_zeros(x.shape[0], -(-x.shape[1] // 8) * 8)
    whole[:, : x.shape[1]] = x
    return whole


KERNEL = Kernel("hopper", matmul, HopperConfig)
