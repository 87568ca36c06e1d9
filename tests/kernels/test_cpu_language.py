"""The language of CPU kernels, and what LLVM makes of it for processors that are not here."""

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from long_cases import others_long
from quantkit.kernels.cpu import (
    attention_blocks,
    attention_kind,
    float8_product,
    float_product,
    object_cache,
    panel_product,
    tile_product,
    wide_product,
)
from quantkit.kernels.cpu.bytes import dot, look_up, look_up_float, looks_up_floats
from quantkit.kernels.cpu.compiling import assembly, callable_at, compiled
from quantkit.kernels.cpu.floats import load_floats, to_stored
from quantkit.kernels.cpu.language import F32, I8, I32, I64, Code, Value
from quantkit.kernels.cpu.pool import Pool, shared_pool
from quantkit.kernels.cpu.processor import KNOWN, Processor, this_processor
from quantkit.kernels.cpu.product import multiply
from quantkit.kernels.cpu.product_kind import Kind
from quantkit.kernels.cpu.tile_product import TileKind
from quantkit.kernels.cpu.tiles import Codes

pytestmark = pytest.mark.kernel
every_processor = pytest.mark.parametrize(
    "processor", others_long(KNOWN, ("x86-64", "haswell", "cascadelake", "cortex-a72", "neoverse-n1"))
)
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
INSTRUCTIONS = {"sdot": "sdot", "vpdpbusd": "vpdpbusd", "pmaddubsw": "vpmaddubsw", "wide": "mul"}


def run(body: object, *tensors: torch.Tensor) -> None:
    address = compiled("kernel", len(tensors), body)  # type: ignore[arg-type]
    callable_at(address, len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def test_loops_and_conditions() -> None:
    """Numbers of 0 to 9, except 4, times two; then their sum."""
    numbers = torch.arange(10)

    def body(code: Code, address: Value) -> None:
        total = code.variable(code.constant(I64, 0))
        with code.loop(0, 10) as place:
            value = code.load(I64, address, place)
            with code.when((value < 4) | (code.constant(I64, 4) < value)):
                code.store(value * 2, address, place)
            total.set(total.get() + code.load(I64, address, place))
        count = code.variable(code.constant(I64, 0))
        with code.repeat() as again:
            again(count.get() < 3)
            count.set(count.get() + 1)
        code.store(total.get() + count.get(), address, 0)

    run(body, numbers)
    assert numbers.tolist() == [2 * sum(range(10)) - 4 + 3, 2, 4, 6, 4, 10, 12, 14, 16, 18]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_stored_as_torch_rounds_them(dtype: torch.dtype) -> None:
    values = torch.randn(16, generator=torch.Generator().manual_seed(0)) * 100
    values[:4] = torch.tensor([float("nan"), float("inf"), 1 + 2**-8, 1 + 3 * 2**-8])  # the last two are ties
    stored, back = torch.zeros(16, dtype=dtype), torch.zeros(16)

    def body(code: Code, source: Value, half: Value, target: Value) -> None:
        code.store(to_stored(code, dtype, code.load(F32.x(16), source)), half)
        code.store(load_floats(code, dtype, 16, half), target)

    run(body, values, stored, back)
    assert torch.equal(stored.nan_to_num(7), values.to(dtype).nan_to_num(7))
    assert torch.equal(back.nan_to_num(7), stored.float().nan_to_num(7))


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_bytes(bits: int) -> None:
    """Codes as the processor takes them, the largest among them; more lanes than any processor has."""
    generator = torch.Generator().manual_seed(bits)
    signed = this_processor().multiplies_signed and bits == 8
    low, high = (-128, 128) if signed else (0, 1 << bits)
    codes = torch.randint(low, high, (128,), generator=generator)
    x = torch.randint(-127, 128, (128,), generator=generator)
    codes[:8], x[:8] = high - 1, -127
    sums = torch.arange(32, dtype=torch.int32)
    expected = sums + (codes * x).view(32, 4).sum(1)

    def body(code: Code, left: Value, right: Value, target: Value) -> None:
        bytes_of = partial(code.load, I8.x(128))
        start = code.load(I32.x(32), target)
        code.store(dot(code, start, bytes_of(left), bytes_of(right), bits=bits), target)

    run(body, codes.to(torch.uint8), x.to(torch.int8), sums)
    assert torch.equal(sums, expected.int())


def test_looking_up_floats() -> None:
    if not looks_up_floats(this_processor()):
        pytest.skip("this processor has no instruction for it")
    table = [0.5 * number - 3 for number in range(16)]
    places, found = torch.randint(0, 1 << 30, (16,), dtype=torch.int32), torch.zeros(16)

    def body(code: Code, source: Value, target: Value) -> None:
        code.store(look_up_float(code, table, code.load(I32.x(16), source)), target)

    run(body, places, found)
    assert torch.equal(found, torch.tensor(table)[places & 15])


def test_looking_up() -> None:
    table = [3, -7, 127, -128, *range(12)]
    places, found = torch.randint(0, 16, (64,), dtype=torch.uint8), torch.zeros(64, dtype=torch.int8)

    def body(code: Code, source: Value, target: Value) -> None:
        code.store(look_up(code, table, code.load(I8.x(64), source)), target)

    run(body, places, found)
    assert torch.equal(found, torch.tensor(table, dtype=torch.int8)[places.int()])


@every_processor
def test_other_processors(processor: Processor) -> None:
    """Their own instruction multiplies, for integers and for tables."""
    table = Codes(4, digits=(tuple(range(16)), tuple(range(16))))
    for codes, body in ((Codes(4, zero=8), multiply), (table, wide_product.multiply)):
        kind = Kind(codes, 32, 2, 2, torch.bfloat16, torch.bfloat16)
        text = assembly("product", 3, partial(body, kind=kind), processor)
        widened = processor.dot == "pmaddubsw" and codes.digits
        assert ("vpm" if widened else INSTRUCTIONS[processor.dot]) in text


@every_processor
def test_floats_on_other_processors(processor: Processor) -> None:
    """They compile, and multiply and add in one instruction where there is one."""
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        kind = float_product.Kind(stored, torch.bfloat16, 4)
        text = assembly("product", 3, partial(float_product.multiply, kind=kind), processor)
        assert processor.cpu == "x86-64" or "fmla" in text or "vfmadd" in text
    if processor.multiplies_halves:
        for tokens in (1, 9):
            halves = float8_product.kind_for(torch.bfloat16, tokens)
            text = assembly("product", 3, partial(float8_product.multiply, kind=halves), processor)
            assert re.search(r"fmla(\.8h|\tv\d+\.8h)|vfmadd\d+ph", text), "of float16"
    table = Kind(Codes(4, digits=(tuple(range(16)),)), 32, 3, 1, torch.float32, torch.float16)
    few = assembly("product", 3, partial(tile_product.multiply, kind=TileKind(table, torch.bfloat16, 2)), processor)
    assert processor.vector < 64 or re.search(r"vperm(d|ps)", few), "a table of floats"
    for codes in (table, None):
        panels = panel_product.PanelKind(codes, torch.bfloat16, *panel_product.shape_for(processor, 8))
        text = assembly("product", 3, partial(panel_product.multiply, kind=panels), processor)
        assert processor.cpu == "x86-64" or "fmla" in text or "vfmadd" in text
    heads = attention_kind.Kind(torch.bfloat16, torch.bfloat16, 64, sinks=False)
    assert assembly("attend", 3, partial(attention_blocks.attend_blocks, kind=heads), processor)
    rounding = Kind(Codes(8, zero=0), 128, 1, 2, torch.bfloat16, torch.float32, outliers=True)
    assert assembly("product", 3, partial(multiply, kind=rounding), processor)


@pytest.mark.parametrize("count", [37, 1000])  # the latter several at once
def test_every_piece_is_done_once(count: int) -> None:
    """By jobs that follow at once, and by jobs after all threads fell asleep; callers take turns."""

    def add_one(code: Code, arguments: Value, first: Value, last: Value) -> None:
        numbers = code.load(I64, arguments)
        with code.loop(first, last) as place:
            code.store(code.load(I64, numbers, place) + 1, numbers, place)

    kernel, numbers, pool = compiled("add_one", 3, add_one), torch.zeros(count, dtype=torch.int64), Pool(4)
    busy = [threading.Thread(target=lambda: [pool.run(kernel, [numbers.data_ptr()], count) for _ in range(300)])]
    busy += [threading.Thread(target=lambda: [pool.run(kernel, [numbers.data_ptr()], count - 1) for _ in range(300)])]
    for thread in busy:
        thread.start()
    for thread in busy:
        thread.join()
    pause = threading.Event()
    for _ in range(5):
        pause.wait(0.01)
        pool.run(kernel, [numbers.data_ptr()], count)
    pool.close()
    assert numbers.tolist() == [605] * (count - 1) + [305]


def test_the_pool_of_a_process_is_one() -> None:
    assert shared_pool() is shared_pool()
    assert shared_pool().threads == torch.get_num_threads()


def test_machine_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a kernel was written by and for; a damaged file is made again, and so is what has no name."""
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "kernels")
    made: list[bytes] = []

    def compile() -> bytes:
        made.append(len(made).to_bytes(1, "little") * 100)
        return made[-1]

    def object_of(body: Any, processor: Processor = KNOWN["haswell"]) -> bytes:
        return object_cache.kept_object("product", body, processor, compile)

    kinds = [Kind(Codes(bits, zero=2), 128, 1, 2, torch.bfloat16, torch.float32) for bits in (4, 4, 8)]
    first, again, other = (object_of(partial(multiply, kind=kind)) for kind in kinds)
    assert first == again != other
    assert object_of(partial(multiply, kind=kinds[0]), KNOWN["znver4"]) not in (first, other)
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert object_of(partial(multiply, kind=kinds[0])) == made[3]
    assert object_of(partial(multiply, kind=kinds[0])) == made[3]
    assert object_of(compile) != object_of(compile)  # of no kernel here
    monkeypatch.setattr(object_cache, "cache_folder", lambda: Path("/proc/nowhere"))
    assert object_of(partial(multiply, kind=kinds[0])) == made[-1]
    assert len(made) == 7
