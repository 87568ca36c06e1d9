"""Our NF4, FP4 and LLM.int8 against bitsandbytes' own functions: bit for bit where its backends agree."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.formats import Fp4, LlmInt8, Nf4, Parts
from quantkit.formats.codebook import dynamic_table, scale_blocks, table_of

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

KINDS = {"nf4": Nf4, "fp4": Fp4}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _normal(*shape: int, scale: float = 0.02) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def _with(weight: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(weight)
    return weight


def _midpoints(kind: str) -> Tensor:
    """Values exactly between two table entries, in blocks whose absmax is a power of two."""
    table = table_of(kind).sort().values
    row = torch.cat([table, (table[:-1] + table[1:]) / 2, torch.tensor([1.0])])  # 32 values, absmax 1
    return torch.stack([row * 2.0**exponent for exponent in range(-4, 4)])


WEIGHTS = {
    "normal": _normal(96, 160),
    "many blocks": _normal(320, 512),
    "odd sizes": _normal(33, 65),
    "smaller than a block": _normal(3, 7),
    "one value": _normal(1, 1),
    "zeros": torch.zeros(16, 64),
    "zero rows": _with(_normal(16, 128), lambda w: w[3:7].zero_()),
    "zero block ends in a row": _with(_normal(16, 96), lambda w: w[2:5, 10:].zero_()),
    "constant": torch.full((16, 64), -0.37),
    "constant blocks": torch.arange(-8, 8).float().repeat_interleave(64).view(16, 64),
    "huge": _normal(16, 128, scale=1.2e4),
    "small": _normal(16, 128, scale=1e-5),
    "outliers": _with(_normal(32, 128), lambda w: w[:, ::17].mul_(300)),
    "nf4 midpoints": _midpoints("nf4"),
    "fp4 midpoints": _midpoints("fp4"),
    "all positive": _normal(16, 130).abs(),
}


def _state_of(parts: Parts, bnb: ModuleType) -> Any:
    """bitsandbytes' state from our parts, the way its loader builds it."""
    state = {name.removeprefix("weight."): part.clone() for name, part in parts.items() if name != "weight"}
    return bnb.QuantState.from_dict(state, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [32, 64, 4096])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_plain_codes_and_scales_are_equal(
    name: str, kind: str, block: int, dtype: torch.dtype, bnb: ModuleType
) -> None:
    weight = WEIGHTS[name].to(dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind)
    ours = KINDS[kind](block=block, double_quant=False, dtype=str(dtype)[6:]).encode(weight)
    assert torch.equal(ours["weight"], packed)
    # An all-zero block gets absmax 0 there when it is full, 1e-38 when it is short; ours is 0 for both.
    assert torch.equal(ours["weight.absmax"], state.absmax.where(state.absmax > 2e-38, 0))
    theirs = state.as_dict(packed=True)
    for part in ("quant_map", f"quant_state.bitsandbytes__{kind}"):
        assert torch.equal(ours[f"weight.{part}"], theirs[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_nested_scales_are_equal(name: str, kind: str, block: int, dtype: torch.dtype, bnb: ModuleType) -> None:
    weight = WEIGHTS[name].to(dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=True)
    ours = KINDS[kind](block=block, double_quant=True, dtype=str(dtype)[6:]).encode(weight)
    theirs = state.as_dict(packed=True)
    assert torch.equal(ours["weight"], packed)
    for part in ("nested_absmax", "nested_quant_map", f"quant_state.bitsandbytes__{kind}"):
        assert torch.equal(ours[f"weight.{part}"], theirs[part]), part
    _, plain = bnb.quantize_4bit(weight, blocksize=block, quant_type=kind)
    assert torch.equal(ours["weight.absmax"], _quantize_8bit(plain.absmax - plain.absmax.mean()))


def _portable(name: str, *arguments: object) -> Any:
    """A kernel of bitsandbytes in its version for devices without one of their own, which is exact.

    Its CPU library is not: it reads 8-bit codes from a table of 65536 entries, off by one near midpoints; and with
    AVX-512 it decodes 4-bit weights wrongly, its own as well, where the block does not divide the row (24% off).
    """
    kernel = getattr(torch.ops.bitsandbytes, name).default
    return kernel._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


def _quantize_8bit(values: Tensor) -> Tensor:
    codes: Tensor = _portable("quantize_blockwise", values, dynamic_table(), 256)[0]
    return codes


def test_nested_codes_are_never_worse_than_the_cpu_table(bnb: ModuleType) -> None:
    absmax = _normal(1, 100_000).flatten()
    theirs, _ = bnb.quantize_blockwise(absmax, blocksize=256)
    ours = _quantize_8bit(absmax)
    scaled, _ = scale_blocks(absmax, 256)
    error = (dynamic_table()[ours.int()] - scaled).abs()
    their_error = (dynamic_table()[theirs.int()] - scaled).abs()
    assert bool((error <= their_error + 1e-7).all())
    assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_bitsandbytes_decodes_ours_to_the_same_bits(
    name: str, kind: str, double_quant: bool, dtype: torch.dtype, bnb: ModuleType
) -> None:
    fmt = KINDS[kind](double_quant=double_quant, dtype=str(dtype)[6:])
    parts = fmt.encode(WEIGHTS[name].to(dtype))
    state = _state_of(parts, bnb)
    scales = state.absmax
    if state.nested:
        scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    decoded = _portable("dequantize_4bit", parts["weight"], scales, fmt.block, kind, state.shape, dtype)
    assert torch.equal(decoded, fmt.decode(parts, dtype))
    if state.shape[1] % fmt.block == 0:
        assert torch.equal(bnb.dequantize_4bit(parts["weight"], state), decoded)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_we_decode_theirs_to_the_same_bits(kind: str, storage: torch.dtype, bnb: ModuleType) -> None:
    weight = WEIGHTS["many blocks"].bfloat16()
    packed, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type=kind, quant_storage=storage)
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    ours = KINDS[kind]().decode({"weight": packed} | parts, torch.bfloat16)
    assert torch.equal(ours, bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_int8_codes_and_scales_are_equal(name: str, dtype: torch.dtype, bnb: ModuleType) -> None:
    weight = WEIGHTS[name].to(dtype)
    codes, scb, _ = bnb.int8_vectorwise_quant(weight.half())
    parts = LlmInt8().encode(weight)
    assert torch.equal(parts["weight"], codes)
    assert torch.equal(parts["SCB"], scb)
    decoded = bnb.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    torch.testing.assert_close(LlmInt8().decode(parts), decoded, rtol=3e-7, atol=0)  # (c * s) / 127 or c * (s / 127)


def _activations(tokens: int, *, outliers: bool) -> Tensor:
    """Inputs [tokens, 96]; with outliers: whole columns, single values, one exactly at 6, and a row of nothing else."""
    inputs = _normal(tokens, 96, scale=1.0)
    if outliers:
        inputs[:, 11] *= 40
        inputs[0, 50], inputs[-1, 70], inputs[-1, 71] = 6.0, -6.0, 5.9
        inputs[1:2] = torch.where(torch.arange(96) % 2 == 0, 30.0, 0.0)
    return inputs


@pytest.mark.parametrize("threshold", [0.0, 3.0, 6.0])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_activations_are_rounded_to_the_same_bits(
    dtype: torch.dtype, tokens: int, outliers: bool, threshold: float, bnb: ModuleType
) -> None:
    """Where rows are scaled as bitsandbytes scales them: by the columns that are left after it took the outliers out.

    It scales them by small values in the outlier columns too; then ours is nearer to the inputs.
    """
    inputs = _activations(tokens, outliers=outliers).to(dtype)
    ours = LlmInt8(threshold=threshold).served_inputs(inputs)
    codes, absmax, columns = bnb.int8_vectorwise_quant(inputs.half(), threshold=threshold)
    columns = torch.empty(0, dtype=torch.long) if columns is None else columns
    theirs = _decoded(codes, absmax, columns, inputs)
    rest = inputs.half().index_fill(1, columns, 0)
    codes, absmax, _ = bnb.int8_vectorwise_quant(rest)
    assert torch.equal(ours, _decoded(codes, absmax, columns, inputs))
    if tokens == 1 or len(columns) == 0:
        assert torch.equal(ours, theirs)
    assert float((ours - inputs).float().norm()) <= float((theirs - inputs).float().norm())


def _decoded(codes: Tensor, absmax: Tensor, outliers: Tensor, inputs: Tensor) -> Tensor:
    """What int8 activations stand for, with the outlier columns that bitsandbytes takes as they are."""
    decoded = (codes.float() * (absmax / 127).unsqueeze(-1)).to(inputs.dtype)
    decoded[:, outliers] = inputs[:, outliers]
    return decoded


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("shape", [(33,), (2, 17), (1, 1)], ids=str)
def test_int8_layers_compute_what_served_inputs_say(shape: tuple[int, ...], threshold: float, bnb: ModuleType) -> None:
    """The whole layer, in float32: bitsandbytes' int8 multiplication against ours in plain arithmetic.

    The outlier columns hold outliers only, so that both scale the rows alike.
    """
    from bitsandbytes import MatmulLtState, matmul

    fmt = LlmInt8(threshold=threshold)
    inputs = _activations(torch.Size(shape).numel(), outliers=False).view(*shape, 96)
    inputs[..., 20:23] += 7.3 * inputs[..., 20:23].sign()
    quantized = fmt.quantize(_normal(64, 96))
    state = MatmulLtState(CB=quantized.codes, SCB=quantized.row_absmax)
    state.threshold, state.is_training, state.has_fp16_weights = threshold, False, False
    theirs = matmul(inputs, quantized.codes, state=state)
    ours = fmt.served_inputs(inputs) @ quantized.dequantize().T
    exact = inputs @ quantized.dequantize().T
    error, share_of_rounding = (float((theirs - ours).norm() / other.norm()) for other in (ours, exact - ours))
    assert error < 3e-5  # their constant for 1 / 127^2 is 1.8e-5 off
    assert share_of_rounding < 0.02


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_the_int8_kernel_computes_what_bitsandbytes_does(tokens: int, bnb: ModuleType) -> None:
    """Our kernel, interpreted, against bitsandbytes' own int8 matmul in float16, outliers planted."""
    from bitsandbytes import MatmulLtState, matmul

    from quantkit.kernels.linear.eight_bit import matmul as eight_bit_matmul
    from quantkit.kernels.linear.eight_bit import weight as eight_bit

    fmt = LlmInt8()
    inputs = _activations(tokens, outliers=False).half()
    inputs[:, 20:23] += 7.3 * inputs[:, 20:23].sign()
    inputs[0, 90] = -40.0
    quantized = fmt.quantize(_normal(64, 96))
    state = MatmulLtState(CB=quantized.codes, SCB=quantized.row_absmax)
    state.threshold, state.is_training, state.has_fp16_weights = 6.0, False, False
    theirs = matmul(inputs, quantized.codes, state=state).float()
    config = eight_bit_matmul.EightBitConfig(32, 8, 128, 2, 3)
    ours = eight_bit_matmul.matmul(inputs, eight_bit.lay_out(fmt, quantized), config).float()
    assert float((theirs - ours).norm() / ours.norm()) < 2e-3  # float16 results, rounded once each
