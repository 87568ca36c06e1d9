"""Products with weights in GGUF blocks: what their decoded numbers give, on a CPU and by the weight-only kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gguf_files import random_blocks
from pairwise import cover
from quantkit.formats.gguf import TYPES, Gguf, GgufWeight
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.cpu import weight as cpu
from quantkit.kernels.linear.cpu.tiled import Tiles
from quantkit.kernels.linear.decoded import DecodedWeight
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.grouped.weight import why_not as why_not_stacked
from quantkit.kernels.linear.op import explain, linear, prepare
from quantkit.kernels.linear.weight_only import gguf

pytestmark = pytest.mark.kernel

# Relative errors: x in three digits; bfloat16 in two for one token or two, else and beside small scales in one.
LIMITS = {(torch.float32, 1): 1e-6, (torch.float32, 5): 1e-6, (torch.bfloat16, 1): 4e-3, (torch.bfloat16, 5): 1e-2}
CASES = cover(list(TYPES), [torch.float32, torch.bfloat16], [1, 5], [(200, 512), (16, 1024)], [True, False])


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> GgufWeight:
    return Gguf(kind).unpack({"weight": random_blocks(kind, outputs, inputs, seed)})


def error(found: Tensor, x: Tensor, weight: GgufWeight, bias: Tensor | None = None) -> float:
    wanted = x.double() @ weight.dequantize().double().T + (0.0 if bias is None else bias.double())
    return float((found.double() - wanted).norm() / wanted.norm())


def make_x(tokens: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)) + 0.3).to(dtype)


@pytest.mark.skipif(not installed.can_compile(), reason="llvmlite is not installed")
@pytest.mark.parametrize(("kind", "dtype", "tokens", "shape", "biased"), CASES)
def test_on_a_cpu(kind: str, dtype: torch.dtype, tokens: int, shape: tuple[int, int], biased: bool) -> None:
    weight, x = weight_of(kind, *shape), make_x(tokens, shape[1], dtype)
    bias = make_x(1, shape[0], dtype)[0] if biased else None
    prepared = prepare(Gguf(kind), weight, dtype)
    assert explain(prepared, tokens).startswith("tiles")
    assert error(linear(x, prepared, bias), x, weight, bias) < LIMITS[dtype, 5 if TYPES[kind].has_groups else tokens]


@pytest.mark.skipif(not installed.can_compile(), reason="llvmlite is not installed")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if TYPES[kind].has_groups])
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_the_largest_whole_numbers(kind: str, tokens: int) -> None:
    """Codes, small scales, minimums and x as large as can be, of one sign: no sum of a block overflows."""
    full = weight_of(kind, 16, 512)
    small = {"scales": torch.full_like(full.scales, int(full.scales.abs().max()))}  # type: ignore[arg-type, union-attr]
    if full.mins is not None:
        small["mins"] = torch.full_like(full.mins, int(full.mins.max()))
    most = replace(full, codes=torch.full_like(full.codes, (1 << TYPES[kind].bits) - 1), **small)
    x = torch.full((tokens, 512), -1.0).bfloat16()
    assert error(linear(x, prepare(Gguf(kind), most, torch.bfloat16)), x, most) < 4e-3


@pytest.mark.skipif(not installed.can_compile(), reason="llvmlite is not installed")
@pytest.mark.parametrize("kind", TYPES)
def test_memory_is_that_of_the_file(kind: str) -> None:
    """Nearly: small scales have a byte each, and 3 bits in groups of 16 are kept as 4."""
    held = prepare(Gguf(kind), weight_of(kind, 64, 1024), torch.bfloat16)
    more = {"Q3_K": 1.125, "Q2_K": 0.5, "Q4_K": 0.125, "Q5_K": 0.125, "IQ4_XS": 0.0625}.get(kind, 0.0)
    assert 8 * held.nbytes / (64 * 1024) == TYPES[kind].bits_per_weight + more


@pytest.mark.skipif(not installed.can_compile(), reason="llvmlite is not installed")
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
def test_cut_and_joined_on_a_cpu(kind: str) -> None:
    """A cut through blocks leaves groups with scales of their own; layers with one input become one weight."""
    whole, fmt = weight_of(kind, 144, 1024), Gguf(kind)
    cut = whole.cut(slice(8, 40), slice(128, 864))
    x = make_x(3, 1024, torch.float32)
    prepared = prepare(fmt, cut, torch.float32)
    part = x[:, 128:864].contiguous()
    assert error(linear(part, prepared), part, cut) < 1e-6
    rows = [whole.cut(slice(0, 128), slice(0, 1024)), whole.cut(slice(128, 144), slice(0, 1024))]
    joined = join([prepare(fmt, one, torch.float32) for one in rows])
    assert joined is not None
    assert error(linear(x, joined), x, whole) < 1e-6


def test_without_a_compiler_weights_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "can_compile", lambda: False)
    weight, x = weight_of("Q4_K", 32, 256), make_x(2, 256, torch.float32)
    prepared = prepare(Gguf("Q4_K"), weight, torch.float32)
    assert isinstance(prepared, DecodedWeight)
    assert "without their kernel" in explain(prepared, 2)
    assert error(linear(x, prepared), x, weight) < 1e-6


def test_groups_that_no_kernel_takes_are_decoded() -> None:
    """A cut may leave groups of any size."""
    cut = weight_of("Q4_0", 16, 128).cut(slice(0, 16), slice(4, 68))
    assert cpu.lay_out(Gguf("Q4_0"), cut, torch.float32) is None
    assert not isinstance(prepare(Gguf("Q4_0"), cut, torch.float32), Tiles)


def on(device: str, weight: GgufWeight) -> GgufWeight:
    parts = {name: part.to(device) for name, part in vars(weight).items() if isinstance(part, Tensor)}
    return replace(weight, **parts)


@pytest.mark.parametrize(("kind", "dtype", "tokens"), cover(list(TYPES), [torch.bfloat16, torch.float16], [1, 9]))
def test_by_the_weight_only_kernels(device: str, kind: str, dtype: torch.dtype, tokens: int) -> None:
    weight, x = weight_of(kind, 136, 512), make_x(tokens, 512, dtype)
    bias = make_x(1, 136, dtype)[0]
    found = linear(x.to(device), gguf.lay_out(on(device, weight)), bias.to(device)).cpu()
    assert error(found, x, weight, bias) < (4e-3 if dtype == torch.bfloat16 else 8e-4)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_joined_for_the_weight_only_kernels(device: str, kind: str) -> None:
    whole, x = weight_of(kind, 144, 512), make_x(2, 512, torch.bfloat16)
    rows = [whole.cut(slice(0, 128), slice(0, 512)), whole.cut(slice(128, 144), slice(0, 512))]
    joined = join([gguf.lay_out(on(device, one)) for one in rows])
    assert joined is not None
    assert joined.nbytes > 0
    assert error(linear(x.to(device), joined).cpu(), x, whole) < 4e-3


def test_routed_kernels_take_types_without_minimums() -> None:
    assert why_not_stacked([Gguf("Q6_K")], 512) is None
    assert why_not_stacked([Gguf("Q4_K")], 512) == "Q4_K has minimums beside its codes"
    assert why_not_stacked([Gguf("Q6_K"), Gguf("Q8_0")], 512) == "they are in different formats"
