"""FP8 with a calibrated activation scale: how a weight gets it, how it is stored, what is refused."""

from typing import Any

import pytest
import torch

from quantkit.errors import CannotHold, InputError
from quantkit.formats import CtFloat8, Float8Weight
from quantkit.formats.base import TensorInfo
from quantkit.formats.compressed_tensors import CompressedTensorsDialect

STATIC = CtFloat8(strategy="tensor", activations="static")
WEIGHT = torch.randn(24, 48, generator=torch.Generator().manual_seed(0)) * 0.05
SPELLING = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_input_scale_is_stored_as_announced(strategy: str, dtype: str) -> None:
    fmt = CtFloat8(strategy=strategy, activations="static", dtype=dtype)
    quantized = fmt.with_input_scale(fmt.quantize(WEIGHT), 12.5)
    parts = fmt.pack(quantized)
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == fmt.parts((24, 48))
    assert float(parts["input_scale"]) == pytest.approx(12.5 / 448, rel=4e-3)
    read = fmt.unpack(parts)
    assert isinstance(read, Float8Weight)
    assert read.input_scale is not None
    assert torch.equal(read.input_scale, parts["input_scale"])
    assert torch.equal(read.dequantize(), quantized.dequantize())
    scalar = parts | {"input_scale": parts["input_scale"].reshape(())}  # as some writers store it
    assert fmt.pack(fmt.unpack(scalar))["input_scale"].shape == (1,)


def test_static_without_calibration_is_refused() -> None:
    with pytest.raises(CannotHold, match="calibration data, or set activations to dynamic"):
        STATIC.encode(WEIGHT)


def test_other_formats_ignore_the_scale() -> None:
    quantized = CtFloat8().quantize(WEIGHT)
    assert CtFloat8().with_input_scale(quantized, 3.0) is quantized
    carried = STATIC.with_input_scale(STATIC.quantize(WEIGHT), 3.0)
    assert set(CtFloat8(strategy="tensor").pack(carried)) == {"weight", "weight_scale"}


def test_inputs_that_were_all_zero_get_scale_one() -> None:
    carried = STATIC.with_input_scale(STATIC.quantize(WEIGHT), 0.0)
    assert STATIC.pack(carried)["input_scale"].tolist() == [1.0]


@pytest.mark.parametrize("absmax", [float("inf"), float("nan")])
def test_unusable_activations_are_refused(absmax: float) -> None:
    with pytest.raises(InputError, match="calibrate again"):
        STATIC.with_input_scale(STATIC.quantize(WEIGHT), absmax)


def test_blocks_have_no_static_activations() -> None:
    with pytest.raises(InputError, match="strategy to tensor"):
        CtFloat8(strategy="block", activations="static")
    with pytest.raises(InputError, match="dynamic, static, exact"):
        CtFloat8(activations="token")


@pytest.mark.parametrize("activations", ["dynamic", "static", "exact"])
def test_the_config_says_how_activations_are_rounded(activations: str) -> None:
    fmt = CtFloat8(strategy="tensor", activations=activations)
    config = CompressedTensorsDialect().write({"model.layers.0.mlp.up_proj": fmt}, ["lm_head"])
    inputs: dict[str, Any] | None = config["config_groups"]["group_0"]["input_activations"]
    told = inputs and {key: inputs[key] for key in ("num_bits", "type", "strategy", "dynamic", "symmetric")}
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    expected = {
        "dynamic": float8 | {"strategy": "token", "dynamic": True},
        "static": float8 | {"strategy": "tensor", "dynamic": False},
        "exact": None,
    }
    assert told == expected[activations]
    stored = {
        f"model.layers.0.mlp.up_proj.{name}": TensorInfo(SPELLING[spec.dtype], spec.shape)
        for name, spec in fmt.parts((24, 48)).items()
    }
    assert CompressedTensorsDialect().read(config, stored) == {"model.layers.0.mlp.up_proj": fmt}
