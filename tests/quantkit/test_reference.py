"""load_reference with activations as served: layer by layer what the format says, and nothing where it says nothing."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quantkit import load_reference
from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.errors import InputError, StorageError
from quantkit.formats import CtFloat8, CtInt8, Format, LlmInt8, Nf4, dialect_of

IDS = torch.arange(3, 67)[None]
STATIC = CtFloat8(strategy="tensor", activations="static")
ROUNDING = [LlmInt8(threshold=4.0), CtInt8(), CtFloat8(), CtFloat8(strategy="block"), STATIC]


def write_quantized(source: Path, output: Path, fmt: Format) -> Path:
    """All block linears of a plain checkpoint in one format; static scales fit inputs up to 8."""
    checkpoint = Checkpoint(source)
    modules = [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight")]
    with CheckpointWriter(output) as writer:
        for name in checkpoint.tensors:
            if name.removesuffix(".weight") not in modules:
                writer.add(name, checkpoint.tensor(name))
        for module in modules:
            quantized = fmt.quantize(checkpoint.tensor(f"{module}.weight"))
            for part, tensor in fmt.pack(fmt.with_input_scale(quantized, 8.0)).items():
                writer.add(f"{module}.{part}", tensor)
        formats = dict.fromkeys(modules, fmt)
        config = checkpoint.config | {"quantization_config": dialect_of(formats).write(formats, ["lm_head"])}
        writer.add_json("config.json", config)
        writer.finish()
    return output


def watched_layers(model: nn.Module) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Logits, and (input, output) of every linear as its hooks left them."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: seen.__setitem__(name, (inputs[0], output))
            )
    with torch.no_grad():
        return model(IDS).logits, seen


@pytest.mark.parametrize("fmt", ROUNDING, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")
def test_layers_see_the_inputs_that_a_kernel_sees(fmt: Format, tiny_model: Path, tmp_path: Path) -> None:
    folder = write_quantized(tiny_model, tmp_path / "out", fmt)
    exact_logits, exact = watched_layers(load_reference(folder, "float32"))
    logits, served = watched_layers(load_reference(folder, "float32", activations="served"))
    checkpoint = Checkpoint(folder)
    first = "model.layers.0.self_attn.q_proj"  # before it nothing was rounded, so both runs give it the same input
    expected = fmt.served_inputs(exact[first][0], checkpoint.quantized(first))
    assert torch.equal(served[first][0], expected)
    assert not torch.equal(expected, exact[first][0])
    for module in checkpoint.formats:
        inputs, output = served[module]
        assert torch.allclose(output, inputs @ checkpoint.weight(module).T, rtol=1e-4, atol=1e-5), module
    assert "lm_head" not in checkpoint.formats
    error = float((logits - exact_logits).norm() / exact_logits.norm())
    assert 1e-4 < error < 0.2


def test_weight_only_formats_are_served_exactly(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_quantized(tiny_model, tmp_path / "out", Nf4())
    exact, _ = watched_layers(load_reference(folder, "float32"))
    served, _ = watched_layers(load_reference(folder, "float32", activations="served"))
    assert torch.equal(exact, served)


def test_static_scale_that_the_config_promises_must_be_there(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_quantized(tiny_model, tmp_path / "out", CtFloat8(strategy="tensor"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StorageError, match="'input_scale' is missing"):
        load_reference(folder)


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(InputError, match="exact, served"):
        load_reference("demo", activations="rounded")
