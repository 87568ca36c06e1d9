"""`--arithmetic`, and checkpoints that ask for inputs in FP8: what blocks compute, what it takes, who is refused.

On a CPU any number of tokens is computed as a GPU computes many (`tests/kernels/test_linear_float8.py` has both).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError, QuantkitError
from quantkit.formats import CtPacked
from quantkit.formats.float8_rows import float8_rows
from quantkit.inspection import inspect_checkpoint
from quantkit.kernels.card import KNOWN, pretend
from quantkit.kernels.linear import arithmetic, op
from quantkit.kernels.linear.arithmetic import in_float8
from quantkit.kernels.linear.weight_only import float8
from quantkit.kernels.linear.weight_only.float8 import Float8Steps
from quantkit.kernels.linear.weight_only.weight import PackedWeight
from quantkit.kernels.reference import linear as reference
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.reader import Reader
from quantkit.runtime.parallel.rank_memory import rank_weight_bytes
from quantkit.runtime.startup import start_engine

CPU = torch.device("cpu")
FP8_INPUTS = ("rtn-w4g128-ct", "format.activations=fp8")
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def w4a8(quantized_tiny: Callable[..., Path]) -> Path:
    return quantized_tiny(*FP8_INPUTS)


@pytest.fixture(scope="module")
def w4(quantized_tiny: Callable[..., Path]) -> Path:
    return quantized_tiny("rtn-w4g128-ct")


def down_of_first_block(folder: Path, how: str | None, x: torch.Tensor) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    config = read_model_config(checkpoint.config)
    weights = load_weights(checkpoint, config, torch.float32, CPU, arithmetic=how)
    return weights.blocks[0].mlp.linears[1](x)


def test_a_checkpoint_says_that_inputs_are_rounded(w4a8: Path) -> None:
    """As compressed-tensors spells it, which vLLM's rules for W4A8 read."""
    config = json.loads((w4a8 / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["format"] == group["format"] == "pack-quantized"
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    assert inputs.items() <= group["input_activations"].items()
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    assert weights.items() <= group["weights"].items()
    (fmt,) = set(Checkpoint(w4a8).formats.values())
    assert fmt == CtPacked(activations="fp8")
    found = inspect_checkpoint(w4a8)
    assert [scheme for scheme in found.schemes if "W4 g128 sym, FP8 inputs" in scheme]
    loads = {verdict.engine: verdict.loads for verdict in found.engines}
    assert (loads["quantkit"], loads["vLLM"], loads["SGLang"], loads["TensorRT-LLM"]) == (True, True, None, False)


def test_inputs_that_are_rounded_otherwise_stay_in_16_bits(w4a8: Path, tmp_path: Path) -> None:
    """W4A8 with whole numbers, for one, is read as weights of 4 bits."""
    config = json.loads((w4a8 / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["type"] = "int"
    for file in w4a8.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(Checkpoint(tmp_path).formats.values()) == {CtPacked()}


def test_blocks_compute_what_is_asked(w4a8: Path, w4: Path) -> None:
    quantized = Checkpoint(w4).quantized(DOWN)
    x = torch.randn(5, 384)
    exact = x @ quantized.dequantize().T
    rounded = reference.linear(x, *in_float8(quantized))
    assert float((rounded - exact).norm() / exact.norm()) > 0.01
    for folder, how, wanted in (
        (w4, None, exact),
        (w4, "fp8", rounded),
        (w4, "fp8-copy", rounded),
        (w4a8, None, rounded),
        (w4a8, "16-bit", exact),
    ):
        found = down_of_first_block(folder, how, x)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, msg=f"{folder.name} {how}")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid out for kernels of a GPU, which Triton's interpreter runs."""
    for place in (op, arithmetic):
        monkeypatch.setattr(place, "device_of", lambda quantized: torch.device("cuda"))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_layer_on_a_gpu_is_tried_with_few_tokens_and_with_many(w4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(w4)
    config = read_model_config(checkpoint.config)
    reader = Reader(checkpoint, config, torch.bfloat16, CPU, arithmetic="fp8-copy")
    fmt = checkpoint.formats[DOWN]
    part = checkpoint.quantized(DOWN).cut(slice(0, 48), slice(0, 128))
    with pretend(KNOWN["sm_100"]):
        weight = reader.prepared(DOWN, fmt, part)
        assert isinstance(weight, Float8Steps)
        assert weight.copy is not None
        assert weight.copied_bytes == weight.packed.rows * weight.packed.chunks * 128  # a byte each
        monkeypatch.setattr(float8, "row_scales", lambda quantized: 3 * float8_rows(quantized).scales.flatten())
        reader.prepared(DOWN, fmt, part)  # too large a scale costs little
        monkeypatch.setattr(float8, "_decoded", lambda packed, scales: replace(weight.copy, scales=2 * scales))
        with pytest.raises(QuantkitError, match=rf"layer {DOWN} would give garbage: its kernel is off by"):
            reader.prepared(DOWN, fmt, part)
    with pretend(KNOWN["sm_80"]):
        assert isinstance(op.prepare(fmt, part, torch.bfloat16, "fp8"), PackedWeight)


def test_experts_stay_in_16_bits(quantized_experts: Path) -> None:
    checkpoint = Checkpoint(quantized_experts)
    config = read_model_config(checkpoint.config)
    plain, asked = (
        load_weights(checkpoint, config, torch.float32, CPU, arithmetic=how).blocks[0] for how in ("16-bit", "fp8")
    )
    x = torch.randn(3, config.hidden)
    assert not torch.equal(plain.qkv(x), asked.qkv(x))
    for one, other in zip(plain.mlp.experts, asked.mlp.experts, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(one.gate_up(x), other.gate_up(x))


@pytest.fixture(scope="module")
def quantized_experts(family_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    import quantkit

    folder = tmp_path_factory.mktemp("experts") / "w4"
    quantkit.quantize(family_model("mixtral"), "rtn-w4g32", folder, quality_windows=0)
    return folder


def test_an_engine_says_what_it_computes(w4: Path) -> None:
    engine = start_engine(w4, EngineOptions(device="cpu", max_context=64, max_sequences=1, arithmetic="fp8"))
    assert engine.options.as_told == ", arithmetic fp8"
    assert EngineOptions(arithmetic="16-bit", head_bits=8).as_told == ", arithmetic 16-bit, head 8 bit"
    assert EngineOptions().as_told == ""


def test_bytes_of_copies(w4: Path) -> None:
    """A byte for each weight of the blocks, on every rank for its share."""
    checkpoint = Checkpoint(w4)
    config = read_model_config(checkpoint.config)
    sizes = [weight_bytes(checkpoint, torch.bfloat16, how) for how in (None, "fp8", "fp8-copy")]
    weights = sum(rows * columns for rows, columns in map(checkpoint.layer_shape, checkpoint.formats))
    assert sizes == [sizes[0], sizes[0], sizes[0] + weights]
    shares = [rank_weight_bytes(checkpoint, config, torch.bfloat16, Ranks(2, 1, rank), "fp8-copy") for rank in (0, 1)]
    plain = [rank_weight_bytes(checkpoint, config, torch.bfloat16, Ranks(2, 1, rank)) for rank in (0, 1)]
    assert sum(shares) - sum(plain) == weights


def test_layers_are_cut_only_where_they_round_as_the_whole() -> None:
    assert CtPacked(activations="fp8").needs_all_inputs(64)
    assert not CtPacked().needs_all_inputs(64)


def test_wrong_input_is_refused(tiny_model: Path, quantized_tiny: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="arithmetic is 'fp4', but must be one of 16-bit, fp8, fp8-copy"):
        EngineOptions(arithmetic="fp4")
    for folder in (tiny_model, quantized_tiny("rtn-w8a8")):
        with pytest.raises(InputError, match=r"arithmetic is fp8, .* the model has none; leave it out"):
            start_engine(folder, EngineOptions(device="cpu", arithmetic="fp8"))
