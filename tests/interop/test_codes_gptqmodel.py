"""Our GPTQ and AWQ layouts against the layers that GPTQModel runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.formats import Awq, Gptq, IntegerWeight
from signed_scales import with_signs

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

IN, OUT = 256, 96


def _normal(out: int, inputs: int) -> Tensor:
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(out)) * 0.05
    weight[0] = 0  # an all-zero row
    weight[1] = 0.25  # a constant one
    weight[2].abs_()  # one whose zero point is 0, or 1 where 0 cannot be stored
    return weight


def _fill(layer: Any, parts: Mapping[str, Tensor]) -> Any:
    """Parts into a layer as a loader would: every buffer must be there, in its shape and dtype."""
    for name, part in parts.items():
        buffer = getattr(layer, name)
        assert (buffer.shape, buffer.dtype) == (part.shape, part.dtype), name
        buffer.copy_(part)
    return layer.eval()


def _gptq_layer(fmt: Gptq, parts: Mapping[str, Tensor], gptqmodel: ModuleType) -> Any:
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    layer = gptqmodel.TorchLinear(
        bits=fmt.bits,
        group_size=fmt.group_size,
        sym=fmt.sym,
        desc_act=fmt.act_order,
        in_features=IN,
        out_features=OUT,
    )
    _fill(layer, parts)
    if fmt.version == 1:
        convert_gptq_v1_to_v2_format_module(layer, bits=fmt.bits, pack_dtype=torch.int32)
    layer.post_init()
    return layer


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqmodel_decodes_ours_to_the_same_bits(
    bits: int, group_size: int, sym: bool, version: int, gptqmodel: ModuleType
) -> None:
    fmt = Gptq(bits=bits, group_size=group_size, sym=sym, version=version)
    parts = fmt.pack(with_signs(fmt.quantize(_normal(OUT, IN))))
    theirs = _gptq_layer(fmt, parts, gptqmodel).dequantize_weight().T
    assert torch.equal(theirs, fmt.decode(parts, torch.float16))


def _scattered(fmt: Gptq) -> IntegerWeight:
    """The weight of a plain format with its input columns shuffled, as act-order leaves them."""
    plain = replace(fmt, act_order=False).quantize(_normal(OUT, IN))
    shuffle = torch.randperm(IN, generator=torch.Generator().manual_seed(7))
    return replace(plain, codes=plain.codes[:, shuffle], group_of=plain.input_groups()[shuffle].int())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqmodel_decodes_scattered_groups(bits: int, sym: bool, version: int, gptqmodel: ModuleType) -> None:
    fmt = Gptq(bits=bits, group_size=64, sym=sym, version=version, act_order=True)
    quantized = _scattered(fmt)
    layer = _gptq_layer(fmt, fmt.pack(quantized), gptqmodel)
    assert torch.equal(layer.dequantize_weight().T, quantized.dequantize(torch.float16))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_we_read_zero_points_that_gptqmodel_borrowed(bits: int, gptqmodel: ModuleType) -> None:
    """GPTQModel writes version 1 by subtracting from whole words, so a zero point of 0 borrows from its neighbour."""
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    fmt = Gptq(bits=bits, group_size=32, sym=False, version=2)
    quantized = fmt.quantize(_normal(OUT, IN))
    assert bool((quantized.zeros == 0).any())
    layer = _gptq_layer(fmt, fmt.pack(quantized), gptqmodel)
    layer.qzero_format(format=2)
    convert_gptq_v2_to_v1_format_module(layer, _quantize_config(bits))
    parts = {name: getattr(layer, name) for name in fmt.suffixes}
    assert torch.equal(replace(fmt, version=1).decode(parts), quantized.dequantize())


def _quantize_config(bits: int) -> Any:
    from gptqmodel import QuantizeConfig

    return QuantizeConfig(bits=bits, group_size=32, sym=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_gptqmodel_decodes_awq(group_size: int, sym: bool, dtype: str, gptqmodel: ModuleType) -> None:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    fmt = Awq(group_size=group_size, sym=sym, dtype=dtype)
    parts = fmt.pack(with_signs(fmt.quantize(_normal(OUT, IN))))
    theirs = dequantize_gemm(**parts, bits=4, group_size=group_size).T
    assert torch.equal(theirs, fmt.decode(parts, theirs.dtype))


@pytest.mark.parametrize("sym", [True, False])
def test_the_awq_layer_multiplies_with_our_weight(sym: bool, gptqmodel: ModuleType) -> None:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    fmt = Awq(sym=sym)
    parts = fmt.pack(with_signs(fmt.quantize(_normal(OUT, IN))))
    options: dict[str, Any] = {"bits": 4, "group_size": 128, "sym": sym, "desc_act": False}
    layer = AwqTorchLinear(**options, in_features=IN, out_features=OUT, register_buffers=True)
    _fill(layer, parts).post_init()
    identity = torch.eye(IN, dtype=torch.float16)
    assert torch.equal(layer(identity).T, fmt.decode(parts, torch.float16))
