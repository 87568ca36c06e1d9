"""Attention over a paged cache on a CPU, for many new tokens of a sequence: two small products of matrices at a time.

A piece of work is a block of new tokens and one head of keys. Its rows are tokens times the heads that share them,
at most 64. Keys are read 32 or 64 at a time, made float32 and turned (a vector has one number of 16 keys), so that no
score is a sum over lanes; the scores of a row become weights; values are added up by them. Earlier sums fade when a
larger score comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quantkit.kernels.cpu.attention_kind import Held, Kind
from quantkit.kernels.cpu.float_product import places
from quantkit.kernels.cpu.floats import load_floats, store_floats
from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value
from quantkit.kernels.cpu.panels import transposed
from quantkit.kernels.cpu.processor import Processor
from quantkit.kernels.cpu.rows import LANES, exp, total

MOST_ROWS = 64
_LOWEST = -3.0e38


def keys_at_once(head_dim: int) -> int:
    return 64 if head_dim <= 128 else 32


def _registers(processor: Processor) -> tuple[int, int]:
    """Rows and vectors of 16 that a product has sums for, beside one row of vectors and a number."""
    if processor.vector == 64:
        return 6, 4
    return (4, 1) if processor.is_arm else (2, 2) if processor.vector == 32 else (2, 1)


class _Room(NamedTuple):
    """Of a piece of work, float32."""

    queries: Value  # [rows, head_dim], scaled
    keys: Value  # [head_dim, keys at once]
    values: Value  # [keys at once, head_dim]
    scores: Value  # [rows, keys at once], then their weights
    sums: Value  # [rows, head_dim]
    tops: Value  # [rows]: the largest score so far
    totals: Value  # [rows] of weights
    fading: Value  # [rows]: what sums so far count

    @classmethod
    def made(cls, code: Code, kind: Kind) -> _Room:
        some = keys_at_once(kind.head_dim)
        of_rows = MOST_ROWS * kind.head_dim, kind.head_dim * some, some * kind.head_dim, MOST_ROWS * some
        sizes = (*of_rows, MOST_ROWS * kind.head_dim, MOST_ROWS, MOST_ROWS, MOST_ROWS)
        return cls(*(code.room(F32.x(LANES), size // LANES) for size in sizes))


class _Block(NamedTuple):
    """New tokens of one sequence, from `first` on, with one head of keys."""

    first: Value
    rows: Value
    group: Value  # heads that share the keys
    kv_head: Value
    table: Value
    low: Value  # of all keys that a row of it may see
    reach: Value  # one more than the last
    reach_first: Value  # the same of the first token


def attend_blocks(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    """Pieces are counted from the last tokens on, which see most."""
    held, scale, tokens, pieces = Held.read(code, arguments)
    room, group = _Room.made(code, kind), held.heads // held.kv_heads
    with code.loop(first, last) as piece:
        place = pieces - 1 - piece
        block = place // held.kv_heads
        start, kv_head = block * tokens, place - block * held.kv_heads
        with code.loop(0, held.sequences) as sequence:
            begin, end = (code.load(I32, held.starts, sequence + more).to(I64) for more in (0, 1))
            low, high = code.larger(begin, start), code.smaller(end, start + tokens)
            with code.when(low < high):
                context = code.load(I32, held.contexts, sequence).to(I64)
                reach_first = context - (end - low) + 1
                own = _Block(
                    first=low,
                    rows=(high - low) * group,
                    group=group,
                    kv_head=kv_head,
                    table=held.table + sequence * held.table_stride * 4,
                    low=code.larger(reach_first - held.window, code.constant(I64, 0)),
                    reach=reach_first + (high - low) - 1,
                    reach_first=reach_first,
                )
                _attend_block(code, kind, held, own, room, scale)


def _attend_block(code: Code, kind: Kind, held: Held, block: _Block, room: _Room, scale: Value) -> None:
    some, parts = keys_at_once(kind.head_dim), range(0, kind.head_dim, LANES)
    with code.loop(0, block.rows) as row:
        token, head = _token_and_head(block, row)
        source = ((block.first + token) * held.heads + head) * kind.head_dim
        for part in parts:
            query = load_floats(code, kind.dtype, LANES, held.q, source + part)
            code.store(query * scale.splat(LANES), room.queries, row * kind.head_dim + part)
            code.store(code.constant(F32.x(LANES), 0.0), room.sums, row * kind.head_dim + part)
        code.store(code.load(F32, held.sinks, head) if kind.sinks else code.constant(F32, _LOWEST), room.tops, row)
        code.store(code.constant(F32, 1.0 if kind.sinks else 0.0), room.totals, row)
    with code.loop((block.low >> 4) << 4, block.reach, some) as chunk:
        count = code.smaller(block.reach - chunk, code.constant(I64, some))
        _read(code, kind, held, block, room, chunk, count)
        _multiply(code, block.rows, kind.head_dim, some, (room.queries, room.keys, room.scores))
        with code.loop(0, block.rows) as row:
            _weigh(code, held, block, room, row, chunk, some)
        _multiply(code, block.rows, count, kind.head_dim, (room.scores, room.values, room.sums), some, room.fading)
    with code.loop(0, block.rows) as row:
        token, head = _token_and_head(block, row)
        target = ((block.first + token) * held.heads + head) * kind.head_dim
        factor = (code.constant(F32, 1.0) // code.load(F32, room.totals, row)).splat(LANES)
        for part in parts:
            value = code.load(F32.x(LANES), room.sums, row * kind.head_dim + part) * factor
            store_floats(code, kind.dtype, value, held.out, target + part)


def _token_and_head(block: _Block, row: Value) -> tuple[Value, Value]:
    token = row // block.group
    return token, block.kv_head * block.group + (row - token * block.group)


def _read(code: Code, kind: Kind, held: Held, block: _Block, room: _Room, chunk: Value, count: Value) -> None:
    """So many keys and values from `chunk` on, 16 at a time; zeros for keys of which none is there."""
    some = keys_at_once(kind.head_dim)
    with code.loop(0, some, LANES) as start, code.loop(0, kind.head_dim, LANES) as part:
        with code.when(start < count):
            page = code.load(I32, block.table, (chunk + start) // held.page_size).to(I64)
            inside = (chunk + start) - (chunk + start) // held.page_size * held.page_size
            place = ((page * held.kv_heads + block.kv_head) * held.page_size + inside) * kind.head_dim + part
            at = [place + number * kind.head_dim for number in range(LANES)]
            keys = transposed(code, [load_floats(code, kind.kept, LANES, held.keys, one) for one in at])
            for number, key in enumerate(keys):
                code.store(key, room.keys, (part + number) * some + start)
            for number, one in enumerate(at):
                value = load_floats(code, kind.kept, LANES, held.values, one)
                code.store(value, room.values, (start + number) * kind.head_dim + part)
        with code.when(count < start + 1):
            for number in range(LANES):
                code.store(code.constant(F32.x(LANES), 0.0), room.keys, (part + number) * some + start)


def _multiply(
    code: Code,
    rows: Value,
    depth: Value | int,
    width: int,
    matrices: tuple[Value, Value, Value],
    stride: int = 0,
    fading: Value | None = None,
) -> None:
    """result [rows, width] = left [rows, depth] @ right [depth, width], beside what was there times `fading` [rows]."""
    left, right, result = matrices
    at_once, vectors = _registers(code.processor)
    stride = stride or int(depth)  # type: ignore[arg-type]  # of rows of the left
    with code.loop(0, rows, at_once) as first:
        some = places(code, first, at_once, rows)
        for start in range(0, width, vectors * LANES):
            parts = range(start, min(start + vectors * LANES, width), LANES)
            sums = [code.variable(before) for before in _before(code, some, parts, width, result, fading)]
            with code.loop(0, depth) as at:
                values = [code.load(F32.x(LANES), right, at * width + part) for part in parts]
                of_row = iter(sums)
                for row in some:
                    same = code.load(F32, left, row * stride + at).splat(LANES)
                    for value in values:
                        one = next(of_row)
                        one.set(code.fma(same, value, one.get()))
            of_row = iter(sums)
            for row in some:
                for part in parts:
                    code.store(next(of_row).get(), result, row * width + part)


def _before(
    code: Code, rows: list[Value], parts: range, width: int, result: Value, fading: Value | None
) -> Iterator[Value]:
    for row in rows:
        for part in parts:
            if fading is None:
                yield code.constant(F32.x(LANES), 0.0)
            else:
                yield code.load(F32.x(LANES), result, row * width + part) * code.load(F32, fading, row).splat(LANES)


def _weigh(code: Code, held: Held, block: _Block, room: _Room, row: Value, chunk: Value, some: int) -> None:
    """Makes weights of the scores of a row, and says by what its earlier sums fade."""
    reach = block.reach_first + row // block.group
    low = code.larger(reach - held.window, code.constant(I64, 0))
    before = code.load(F32, room.tops, row)
    most, seen, scores = before.splat(LANES), [], []
    for part in range(0, some, LANES):
        key = code.constant(I32.x(LANES), range(part, part + LANES))
        last, first = ((one - chunk).to(I32).splat(LANES) for one in (reach, low))
        seen.append((key < last) & (first < key + 1))
        score = code.load(F32.x(LANES), room.scores, row * some + part)
        scores.append(code.select(seen[-1], score, code.constant(score.type, _LOWEST)))
        most = code.of_each("maximum", most, scores[-1])
    top = code.over_lanes("fmaximum", most)
    sums = code.constant(F32.x(LANES), 0.0)
    for part, (score, is_seen) in enumerate(zip(scores, seen, strict=True)):
        weight = code.select(is_seen, exp(code, score - top.splat(LANES)), code.constant(score.type, 0.0))
        code.store(weight, room.scores, row * some + part * LANES)
        sums = sums + weight
    fading = exp(code, (before - top).splat(1)).at(0)
    code.store(fading, room.fading, row)
    code.store(top, room.tops, row)
    code.store(code.fma(code.load(F32, room.totals, row), fading, total(sums)), room.totals, row)
