"""Our compressed-tensors layouts against the package of that name: packing, reading and writing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.formats import CtFloat8, CtInt8, CtMxfp4, CtNvfp4, CtPacked, Format
from quantkit.formats.bits import pack, unpack
from quantkit.formats.compressed_tensors import CompressedTensorsDialect
from signed_scales import with_signs

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


def _normal(*shape: int) -> Tensor:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.05
    weight[0] = 0  # an all-zero row
    weight[1] = 0.25  # a constant one
    weight[2].abs_()  # one whose zero point is 0 where it is asymmetric
    return weight


def _scheme(fmt: Format) -> Any:
    """The scheme that compressed-tensors reads from the config we write."""
    from compressed_tensors.quantization import QuantizationScheme

    config = CompressedTensorsDialect().write({"layer": fmt}, [])
    return QuantizationScheme.model_validate(config["config_groups"]["group_0"])


def _compressor(fmt: Format, ct: ModuleType) -> Any:
    """The compressor that compressed-tensors picks for the format name we write."""
    return ct.BaseCompressor.get_value_from_registry(_scheme(fmt).format)


PACKED = [
    CtPacked(bits=bits, group_size=size, sym=sym, dtype=dtype)
    for bits in (2, 3, 4, 5, 6, 7, 8)
    for size in (32, 128, -1)
    for sym in (True, False)
    for dtype in ("bfloat16", "float16")
]
OTHERS = [
    CtInt8(),
    CtInt8(dtype="float32"),
    *(CtFloat8(strategy=strategy) for strategy in ("tensor", "channel", "block")),
]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_the_same(bits: int, count: int, ct: ModuleType) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    codes = torch.randint(0, 1 << bits, (5, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    signed = (codes.int() - (1 << (bits - 1))).to(torch.int8)
    words = pack(codes, bits)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(words, bits, signed.shape), signed)
    assert torch.equal(unpack(words, bits, count), codes)
    assert torch.equal(pack_to_int32(signed.T.contiguous(), bits, packed_dim=0), words.T)


@pytest.mark.parametrize("shape", [(48, 256), (40, 384), (130, 128)], ids=str)
@pytest.mark.parametrize("fmt", [*PACKED, *OTHERS], ids=lambda fmt: f"{fmt.name} {fmt.describe()} {fmt.dtype}")
def test_compressed_tensors_decodes_ours_to_the_same_bits(fmt: Format, shape: tuple[int, int], ct: ModuleType) -> None:
    parts = fmt.pack(with_signs(fmt.quantize(_normal(*shape))))
    theirs = _compressor(fmt, ct).decompress(parts, _scheme(fmt))["weight"]
    assert theirs.dtype == parts["weight_scale"].dtype
    assert torch.equal(theirs, fmt.decode(parts, theirs.dtype))


@pytest.mark.parametrize("fmt", [*PACKED, *OTHERS], ids=lambda fmt: f"{fmt.name} {fmt.describe()} {fmt.dtype}")
def test_we_decode_what_compressed_tensors_wrote(fmt: Format, ct: ModuleType) -> None:
    """Same scales and zero points in, the same parts out, to the last bit."""
    parts = fmt.pack(with_signs(fmt.quantize(_normal(48, 256))))
    scheme, compressor = _scheme(fmt), _compressor(fmt, ct)
    weight = fmt.decode(parts)  # in float32: their rounding works in the dtype of the weight
    state = {"weight": weight, "weight_scale": parts["weight_scale"], "weight_zero_point": _zeros(fmt, parts)}
    theirs = compressor.compress(state, scheme)
    assert torch.equal(fmt.decode(theirs), fmt.decode(parts))
    for name, part in parts.items():
        assert torch.equal(theirs[name].view(part.dtype), part), name


def _zeros(fmt: Format, parts: dict[str, Tensor]) -> Tensor | None:
    """Signed zero points, as compressed-tensors takes them."""
    if not isinstance(fmt, CtPacked) or fmt.sym:
        return None
    return (fmt.unpack(parts).zeros.int() - (1 << (fmt.bits - 1))).to(torch.int8)


FLOAT4 = [CtMxfp4(), CtNvfp4()]


@pytest.mark.parametrize("shape", [(48, 256), (5, 96)], ids=str)
@pytest.mark.parametrize("fmt", FLOAT4, ids=lambda fmt: fmt.name)
def test_4_bit_floats_are_read_and_written_as_there(fmt: Format, shape: tuple[int, int], ct: ModuleType) -> None:
    """Their scheme is the preset of that name, they decode ours, and write our parts by our scales."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16

    parts, scheme, compressor = fmt.encode(_normal(*shape)), _scheme(fmt), _compressor(fmt, ct)
    preset = (MXFP4A16 if isinstance(fmt, CtMxfp4) else NVFP4A16)["weights"]
    assert scheme.weights.model_dump(exclude={"observer"}) == preset.model_dump(exclude={"observer"})
    theirs = compressor.decompress(parts, scheme)["weight"]
    assert torch.equal(theirs, fmt.decode(parts, theirs.dtype))

    codes = unpack_fp4_from_uint8(parts["weight_packed"], *shape, dtype=torch.float32)
    scales = fmt.unpack(parts).block_scales.view(shape[0], -1)  # type: ignore[attr-defined]
    weight = codes * scales.repeat_interleave(shape[1] // scales.shape[1], 1)
    assert torch.equal(weight, fmt.decode(parts))
    state = {"weight": weight, "weight_scale": scales}
    if isinstance(fmt, CtNvfp4):
        state |= {"weight_scale": parts["weight_scale"].float(), "weight_global_scale": parts["weight_global_scale"]}
    written = compressor.compress(state, scheme)
    assert torch.equal(written["weight_scale"].view(torch.uint8), parts["weight_scale"].view(torch.uint8))
    assert torch.equal(fmt.decode(written), fmt.decode(parts))


STATIC = CtFloat8(strategy="tensor", activations="static")
ROUNDING = [CtInt8(), CtFloat8(), CtFloat8(strategy="tensor"), CtFloat8(strategy="block"), STATIC]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ROUNDING, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")
def test_activations_are_rounded_as_there(fmt: Format, dtype: torch.dtype, ct: ModuleType) -> None:
    """To the last bit in float32. In 16 bits they keep scales and steps in 16 bits too, ours stay in float32."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = _scheme(fmt).input_activations
    inputs = _normal(18, 256).view(2, 9, 256).to(dtype) * 20
    inputs[:, :, 3] *= 30  # a column of outliers
    quantized = fmt.with_input_scale(fmt.quantize(_normal(48, 256)), inputs.abs().amax() / 2)
    if args.dynamic:
        scale, _ = compute_dynamic_scales_and_zp(inputs, args, torch.nn.Module())
    else:
        scale = fmt.pack(quantized)["input_scale"].to(dtype)
    theirs = fake_quantize(inputs, scale, None, args)
    ours = fmt.served_inputs(inputs, quantized)
    if dtype == torch.float32:
        assert torch.equal(ours, theirs)
    else:
        error, rounding = (ours - theirs).float().norm(), (ours - inputs).float().norm()
        assert ours.dtype == theirs.dtype
        assert float(error) < 0.8 * float(rounding)
    assert not torch.equal(ours, inputs)


def test_static_scales_are_read_and_written_as_there(ct: ModuleType) -> None:
    parts = STATIC.pack(STATIC.with_input_scale(STATIC.quantize(_normal(48, 256)), 17.0))
    scheme, compressor = _scheme(STATIC), _compressor(STATIC, ct)
    assert (scheme.input_activations.dynamic, str(scheme.input_activations.strategy)) == (False, "tensor")
    decompressed = compressor.decompress(dict(parts), scheme)
    assert torch.equal(decompressed["weight"], STATIC.decode(parts, torch.bfloat16))
    assert torch.equal(decompressed["input_scale"], parts["input_scale"])
    state = {"weight": STATIC.decode(parts), "weight_scale": parts["weight_scale"], "weight_zero_point": None}
    theirs = compressor.compress(state | {"input_scale": parts["input_scale"]}, scheme)
    assert torch.equal(STATIC.decode(theirs), STATIC.decode(parts))
