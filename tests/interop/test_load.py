"""Whole checkpoints: what we write, transformers loads through the peers, and it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantkit
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.convert import convert
from quantkit.eval.interop.adapters import ways_to_load
from quantkit.recipe import load_recipe

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

MIXED = """
summary: Four bits, eight where it matters.
method: rtn
format: {name: ct-packed, bits: 4, group_size: 128}
keep: ["model.layers.0.self_attn.o_proj"]
overrides:
  - {modules: "*.mlp.down_proj", bits: 8}
"""
KEPT = """
summary: One kind of layer stays as it is.
method: rtn
format: {name: gptq, bits: 4, group_size: 128}
keep: ["*.mlp.down_proj"]
"""
ROWS = """
summary: Four bits with one zero point per row.
method: rtn
format: {name: ct-packed, bits: 4, group_size: -1, sym: false}
"""
FP8_TENSOR = """
summary: FP8 with one scale per tensor.
method: rtn
format: {name: ct-float8, strategy: tensor}
"""
ACT_ORDER = """
summary: GPTQ with groups that follow the order of the columns.
method: {name: gptq, order: desc_act}
format: {name: gptq, bits: 4, group_size: 128, act_order: true}
"""
GPTQ_3 = """
summary: GPTQ at three bits in GPTQ's own layout.
method: gptq
format: {name: gptq, bits: 3, group_size: 128}
"""
GPTQ_ASYM = """
summary: GPTQ with zero points in GPTQ's own layout.
method: gptq
format: {name: gptq, bits: 4, group_size: 64, sym: false}
"""
OWN = {"mixed": MIXED, "kept": KEPT, "rows": ROWS, "fp8-tensor": FP8_TENSOR}
OWN |= {"act-order": ACT_ORDER, "gptq-3": GPTQ_3, "gptq-asym": GPTQ_ASYM}

EXACT = 1.4e-2  # bfloat16 arithmetic alone makes 0.9 % in the model that is not quantized
INT8 = 3.5e-2  # activations are rounded as well
FLOAT8 = 8e-2  # to three bits of mantissa


@dataclass(frozen=True)
class Peer:
    """The layer class that a peer puts in place, and the dtypes that its weight then has."""

    layers: tuple[str, ...]
    holds: dict[str, torch.dtype]


ATEN = Peer(("TorchAtenLinear",), {"qweight": torch.int32})
AWQ = Peer(("TorchAtenAwqLinear", "AwqTorchLinear"), {"qweight": torch.int32})
TORCH = Peer(("TorchLinear", "TorchAtenLinear"), {"qweight": torch.int32})
BNB4 = Peer(("Linear4bit",), {"weight": torch.uint8})
BNB8 = Peer(("Linear8bitLt",), {"weight": torch.int8})
PACKED = Peer(("Linear",), {"weight_packed": torch.int32})  # compressed-tensors fills the layers of the model
DECODED = Peer(("Linear",), {})  # compressed-tensors leaves the layers of the model as they were
FLOAT4 = Peer(("Linear",), {"weight_packed": torch.uint8})
W8A8 = Peer(("Linear",), {"weight": torch.int8})
FP8 = Peer(("Linear",), {"weight": torch.float8_e4m3fn})

CHECKPOINTS: dict[str, tuple[Peer, float]] = {
    "rtn-w4g128": (ATEN, EXACT),
    "gptq-w4g128": (ATEN, EXACT),
    "gptq-w3g128": (PACKED, EXACT),
    "act-order": (TORCH, EXACT),
    "gptq-3": (TORCH, EXACT),
    "gptq-asym": (TORCH, EXACT),
    "gptq-w4g64-asym": (DECODED, EXACT),
    "awq-w4g128": (AWQ, EXACT),
    "awq-w4g32": (AWQ, EXACT),
    "awq-w3g128": (DECODED, EXACT),
    "best-w4g64": (AWQ, EXACT),
    "auto-w3.5": (PACKED, EXACT),
    "tuned-w4g64": (AWQ, EXACT),
    "tuned-w3g64": (DECODED, EXACT),
    "tuned-w2g64": (DECODED, EXACT),
    "gptq-w2g64": (PACKED, EXACT),
    "smoothquant-w8a8": (W8A8, INT8),
    "fp8-static": (FP8, FLOAT8),
    "rtn-w8": (Peer(("TorchLinear",), {"qweight": torch.int32}), EXACT),
    "kept": (ATEN, EXACT),
    "rtn-w4g128-asym": (AWQ, EXACT),
    "nf4": (BNB4, EXACT),
    "nf4-plain": (BNB4, EXACT),
    "fp4": (BNB4, EXACT),
    "mxfp4": (FLOAT4, EXACT),
    "nvfp4": (FLOAT4, EXACT),
    "llm-int8": (BNB8, INT8),
    "rtn-w4g128-ct": (PACKED, EXACT),
    "rtn-w3g128": (PACKED, EXACT),
    "rtn-w2g64": (DECODED, EXACT),
    "mixed": (PACKED, EXACT),
    "rows": (DECODED, EXACT),
    "rtn-w8a8": (W8A8, INT8),
    "fp8": (FP8, FLOAT8),
    "fp8-block": (FP8, FLOAT8),
    "fp8-tensor": (FP8, FLOAT8),
}
CONVERTED: list[tuple[str, str, Peer]] = [
    ("rtn-w4g128", "compressed-tensors", PACKED),  # scales stay float16 in a bfloat16 model
    ("rtn-w4g128-asym", "compressed-tensors", DECODED),
    ("rtn-w4g128", "gptq-v2", ATEN),
    ("rtn-w4g128", "awq", AWQ),
    ("rtn-w4g128-ct", "gptq", ATEN),
    ("nf4", "nf4-plain", BNB4),
]

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Quantizes by a recipe's name, once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def quantize(name: str) -> Path:
        output = folder / name
        if not output.exists():
            recipe = folder / f"{name}.yaml"
            if name in OWN:
                recipe.write_text(OWN[name])
            little = Calibration(samples=8, seq_len=128)  # for methods that calibrate
            few = ("method.steps=20",) if name.startswith("tuned") else ()
            chosen = load_recipe(str(recipe) if name in OWN else name, few)
            quantkit.quantize(model, chosen, output, calibration=little, quality_windows=0)
        return output

    return quantize


def _load(checkpoint: Path, dtype: torch.dtype | str = "auto") -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    how = ways_to_load(Checkpoint(checkpoint))
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map="cpu", **how)
    return loaded.eval()


def _logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits.float()


def _error(checkpoint: Path, peer: Peer, tokens: Tensor, dtype: torch.dtype | str = "auto") -> float:
    """||peer - reference|| / ||reference|| of the logits, after a look at the layers that the peer made."""
    loaded = _load(checkpoint, dtype)
    formats = Checkpoint(checkpoint).formats
    for name, module in loaded.named_modules():
        if name in formats:
            assert type(module).__name__ in peer.layers
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            assert {part: tensors[part].dtype for part in peer.holds} == peer.holds
        elif isinstance(module, nn.Linear):
            assert module.weight.is_floating_point()
    expected = _logits(quantkit.load_reference(checkpoint, dtype="float32"), tokens)
    error = float((_logits(loaded, tokens) - expected).norm() / expected.norm())
    print(f"relative error of the logits: {error:.2e}")
    return error


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_agree(
    name: str, make: Make, tokens: Tensor, bnb: ModuleType, ct: ModuleType, gptqmodel: ModuleType
) -> None:
    peer, limit = CHECKPOINTS[name]
    # Two bits leave little of a small model, and what is left turns bfloat16 rounding into 1.2e-2.
    dtype = torch.float32 if name.endswith("w2g64") else "auto"
    assert _error(make(name), peer, tokens, dtype) <= limit


@pytest.mark.parametrize(("name", "to", "peer"), CONVERTED, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_agree_after_conversion(
    name: str, to: str, peer: Peer, make: Make, tokens: Tensor, tmp_path: Path, ct: ModuleType, gptqmodel: ModuleType
) -> None:
    convert(make(name), to, tmp_path / "converted")
    assert _error(tmp_path / "converted", peer, tokens) <= EXACT


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_equal(
    name: str, make: Make, tokens: Tensor, bnb: ModuleType, ct: ModuleType, gptqmodel: ModuleType
) -> None:
    """Every layer that the peer holds decodes to our bits; the logits above also carry its arithmetic."""
    loaded = _load(make(name))
    if CHECKPOINTS[name][0].layers == ("Linear",):
        _logits(loaded, tokens)  # compressed-tensors decompresses on the way
    checkpoint = Checkpoint(make(name))
    assert checkpoint.formats
    for module in checkpoint.formats:
        theirs = _decoded(loaded.get_submodule(module))
        torch.testing.assert_close(theirs, checkpoint.quantized(module).dequantize(theirs.dtype), rtol=3e-7, atol=0)


def _decoded(layer: Any) -> Tensor:
    """A layer's weight [out, in] by the peer's own function."""
    import bitsandbytes.functional as bnb
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    kind = type(layer).__name__
    if kind == "Linear4bit":
        weight = bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    elif kind == "Linear8bitLt":
        weight = bnb.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    elif kind in AWQ.layers:
        weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, layer.group_size).T
    else:
        weight = layer.weight if kind == "Linear" else layer.dequantize_weight().T
    assert isinstance(weight, Tensor)
    return weight
