"""Equal shares of a product for the programs of `hopper_kernel.py`, and how a tile that several have is put together.

The product is cut into tiles of 64 outputs for each group of warps times some tokens, tiles into chunks of 128 inputs,
and all chunks of all tiles, tile by tile, into one run for every program. So a program has the end of one tile, then
some whole tiles, then the beginning of another. Whoever has the beginning of a tile finishes it:

    end of a tile        its float32 sum goes to the program's own place in `parts`, and the finisher's flag counts up
    whole tile           stored
    beginning of a tile  waits until all others of the tile have counted, adds their parts in order, stores

A beginning is the last thing that its program does, an end the first, so parts are mostly there when they are wanted.
Nothing depends on timing but the waiting: the same call gives the same bits. Programs take their numbers from a counter
as they start, the highest first. So a program waits only for programs that have started before it, and only for what
these do first, without waiting themselves: whatever order a GPU starts them in, none waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since Triton 3.7


@dataclass(frozen=True)
class Shares:
    """`programs` have `per` chunks each, the first `extra` of them one more; `cut` where that cuts a tile."""

    programs: int
    per: int
    extra: int
    cut: bool


def shares(tiles: int, chunks: int, splits: int, processors: int) -> Shares:
    """The chunks of all tiles for `splits` programs a tile, or for as many programs as there are multiprocessors."""
    units = tiles * chunks
    programs = min(units, tiles * splits if splits else processors)
    per, extra = divmod(units, programs)
    return Shares(programs, per, extra, extra > 0 or per % chunks > 0)


@gluon.jit
def started_before(counter):
    """How many programs of this launch have started before this one; the last one sets the counter back."""
    count = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if count == gl.num_programs(0) - 1:
        gl.store(counter, 0)
    return count


@gluon.jit
def begin_of(program, per, extra):
    """The first unit (chunk of a tile) of a program."""
    return program * per + min(program, extra)


@gluon.jit
def program_of(unit, per, extra):
    """Who has this unit."""
    edge = extra * (per + 1)
    return unit // (per + 1) if unit < edge else extra + (unit - edge) // per


@gluon.jit
def place_of(unit, chunks, token_tiles):
    """A unit as (chunk, tile of tokens, tile of outputs)."""
    tile = unit // chunks
    return unit % chunks, tile % token_tiles, tile // token_tiles


@gluon.jit
def next_place(chunk, across, down, chunks, token_tiles):
    """The unit behind this one."""
    chunk += 1
    across = across + 1 if chunk == chunks else across
    chunk = 0 if chunk == chunks else chunk
    down = down + 1 if across == token_tiles else down
    across = 0 if across == token_tiles else across
    return chunk, across, down


@gluon.jit
def flat(acc, TOKENS: gl.constexpr):
    """A product [64, TOKENS] as one run of numbers, four neighbours a thread: how parts are stored."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    split = acc.reshape((4, 2, 8, TOKENS // 8, 4, 2))  # warp, row half, lane / 4, tokens / 8, lane % 4, token % 2
    return gl.convert_layout(split.permute((3, 0, 2, 4, 1, 5)).reshape((64 * TOKENS,)), layout, assert_trivial=True)


@gluon.jit
def in_order(run, LAYOUT: gl.constexpr, TOKENS: gl.constexpr):
    """Back to [64, TOKENS], with output 16 w + 2 g + h in place of row 16 w + 8 h + g."""
    split = run.reshape((TOKENS // 8, 4, 8, 4, 2, 2)).permute((1, 2, 4, 0, 3, 5))
    return gl.convert_layout(split.reshape((64, TOKENS)), LAYOUT, assert_trivial=True)


@gluon.jit
def store_part(total, place, flag, TOKENS: gl.constexpr):
    """A part for another program, then its flag counts up."""
    at = gl.arange(0, 64 * TOKENS, layout=gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(place + at, total)
    barrier()  # every thread's numbers are stored before they count
    gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def add_parts(total, place, flag, count, STEP: gl.constexpr, TOKENS: gl.constexpr):
    """Waits for `count` parts, which stand STEP apart behind this program's own place, and adds them in order."""
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [flag.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
        )
    barrier()  # all four warps have seen it
    gl.store(flag, 0)  # for the next call
    at = gl.arange(0, 64 * TOKENS, layout=gl.BlockedLayout([4], [32], [4], [0]))
    for other in range(count):
        total += gl.load(place + (other + 1) * STEP + at, cache_modifier=".cg")
    return total
