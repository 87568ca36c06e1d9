"""Where the damage is: errors of linears and blocks, with scales folded or not."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from long_cases import others_long
from quantkit.arch import FAMILIES
from quantkit.bundled import HELDOUT_TEXT
from quantkit.errors import InputError
from quantkit.eval.quality.layer_errors import LayerErrors, layer_errors
from quantkit.eval.quality.windows import read_windows
from quantkit.pipeline import quantize
from quantkit.reference import load_reference, load_tokenizer
from quantkit.sources import model_folder
from tiny_models import save_model

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LAYERS = 2
Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return read_windows(load_tokenizer("demo-draft"), HELDOUT_TEXT, window=48, max_windows=2).ids


def changed(folder: Path, change: Change, model: str | Path = "demo-draft") -> Path:
    """A copy of a model whose weights were changed, in float32 so that folding rounds nothing."""
    shutil.copytree(model_folder(model), folder)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_linear(layer: int, name: str) -> str:
    part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{part}.{name}.weight"


def fold_everything(tensors: dict[str, Tensor]) -> None:
    """Random scales moved from linears into the modules before them: the same function in other numbers."""
    torch.manual_seed(0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm, readers in (
            ("input_layernorm", ("q_proj", "k_proj", "v_proj")),
            ("post_attention_layernorm", ("gate_proj", "up_proj")),
        ):
            weight = tensors[f"{prefix}{norm}.weight"]
            scales = torch.randn(len(weight)).mul(0.5).exp()
            weight /= scales
            for reader in readers:
                tensors[of_linear(layer, reader)] *= scales
        for producer, consumer in (("v_proj", "o_proj"), ("up_proj", "down_proj")):
            first, last = tensors[of_linear(layer, producer)], tensors[of_linear(layer, consumer)]
            scales = torch.randn(len(first)).mul(0.5).exp()
            first /= scales[:, None]
            head = 64 if producer == "v_proj" else len(scales)
            repeats = last.shape[1] // len(scales)
            last *= scales.view(-1, 1, head).expand(-1, repeats, -1).reshape(-1)


def all_errors(found: LayerErrors) -> list[float]:
    return [error for errors in found.linears.values() for error in errors]


def test_identical_models_have_no_error(ids: Tensor) -> None:
    found = layer_errors("demo-draft", "demo-draft", ids)
    assert set(found.linears) == LINEARS
    assert all(len(errors) == LAYERS for errors in found.linears.values())
    assert all_errors(found) == [0.0] * LAYERS * len(LINEARS)
    assert found.blocks == (0.0,) * LAYERS


def test_a_fold_is_no_error(ids: Tensor, tmp_path: Path) -> None:
    found = layer_errors("demo-draft", changed(tmp_path / "folded", fold_everything), ids)
    assert max(all_errors(found)) < 1e-4
    assert max(found.blocks) < 1e-4


@pytest.mark.parametrize("linear", sorted(LINEARS))
def test_a_broken_linear_is_found(linear: str, ids: Tensor, tmp_path: Path) -> None:
    """Random weights in one linear of layer 1, the rest folded: no other linear is blamed, and later blocks suffer."""

    def break_one(tensors: dict[str, Tensor]) -> None:
        fold_everything(tensors)
        weight = tensors[of_linear(1, linear)]
        weight.copy_(torch.randn_like(weight) * weight.std())

    found = layer_errors("demo-draft", changed(tmp_path / "broken", break_one), ids)
    worst = found.worst(3)
    broken = next(one for one in worst if one.linear == linear)
    assert broken.layer == 1
    assert broken.error > 0.5
    partner = {"v_proj": "o_proj", "o_proj": "v_proj", "up_proj": "down_proj", "down_proj": "up_proj"}.get(linear)
    blamed = [one for one in found.worst(99) if one.error > 1e-3]
    assert {(one.layer, one.linear) for one in blamed} <= {(1, linear), (1, partner)}
    assert max(found.blocks[:1]) < 1e-3
    assert min(found.blocks[1:]) > 1e-2


@pytest.mark.parametrize("linear", ["v_proj", "up_proj", "o_proj", "down_proj"])
def test_a_broken_linear_beside_no_fold_is_blamed_alone(linear: str, ids: Tensor, tmp_path: Path) -> None:
    """Also where it is wrong by a mere factor, which on one side alone is no fold."""

    def stretch(tensors: dict[str, Tensor]) -> None:
        tensors[of_linear(1, linear)] *= 1.5

    def replace(tensors: dict[str, Tensor]) -> None:
        tensors[of_linear(1, linear)].normal_(generator=torch.Generator().manual_seed(0))

    for change in (stretch, replace):
        found = layer_errors("demo-draft", changed(tmp_path / change.__name__, change), ids)
        assert {(one.layer, one.linear) for one in found.worst(99) if one.error > 1e-5} == {(1, linear)}
        assert found.linears[linear][1] > 0.49


@torch.no_grad()
def drift(models: tuple[Any, Any], ids: Tensor, blocks: int) -> float:
    """Mean relative error of the hidden states behind so many blocks, by transformers. Not the last: a norm follows."""
    wanted, found = (model(ids, output_hidden_states=True).hidden_states[blocks] for model in models)
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean())


def test_rounding_errors_are_those_of_the_definition(ids: Tensor, quantized_draft: Callable[..., Path]) -> None:
    """Without folds, against transformers with hooks: the same inputs through original and decoded weights."""
    folder = quantized_draft("rtn-w4g64")
    found = layer_errors("demo-draft", folder, ids)
    original, rounded = load_reference("demo-draft", "float32"), load_reference(folder, "float32")
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        inputs: list[Tensor] = []
        module = original.get_submodule(f"model.layers.1.{name}")
        hook = module.register_forward_pre_hook(lambda _, given, seen=inputs: seen.append(given[0]))
        with torch.no_grad():
            original(ids)
            hook.remove()
            wanted, got = (model.get_submodule(f"model.layers.1.{name}")(inputs[0]) for model in (original, rounded))
        error = float((got - wanted).norm() / wanted.norm())
        assert found.linears[name.rpartition(".")[2]][1] == pytest.approx(error, rel=1e-3)
    assert found.blocks[0] == pytest.approx(drift((original, rounded), ids, 1), rel=1e-3)


@pytest.mark.parametrize(("recipe", "limit"), [("awq-w4g64", 0.12), ("smoothquant-w8a8", 0.05)])
def test_methods_that_fold_look_as_good_as_they_are(
    recipe: str, limit: float, ids: Tensor, quantized_draft: Callable[..., Path]
) -> None:
    folder = quantized_draft(recipe)
    found = layer_errors("demo-draft", folder, ids)
    assert min(all_errors(found)) > 0
    assert max(all_errors(found)) < limit
    models = load_reference("demo-draft", "float32"), load_reference(folder, "float32", activations="served")
    assert found.blocks[0] == pytest.approx(drift(models, ids, 1), rel=0.02)
    assert found.blocks[0] < 3 * limit


@pytest.mark.parametrize("family", others_long(list(FAMILIES), ("llama", "gemma2", "mixtral", "deepseek_v3")))
def test_every_family(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(family, folder, initializer_range=0.02)
    quantize(folder, "rtn-w4g32", tmp_path / "q", quality_windows=0)
    tokens = torch.randint(3, 110, (2, 40), generator=torch.Generator().manual_seed(0))
    found = layer_errors(folder, tmp_path / "q", tokens)
    assert len(found.blocks) == 2
    for error in (*all_errors(found), *found.blocks):
        assert 0.001 < error < 0.4


def test_results_in_words(ids: Tensor) -> None:
    found = LayerErrors({"q_proj": (0.1, 0.3), "o_proj": (0.2, 0.05)}, (0.1, 0.4))
    assert [(one.layer, one.linear) for one in found.worst(3)] == [(1, "q_proj"), (0, "o_proj"), (0, "q_proj")]
    assert found.to_dict() == {"linears": {"q_proj": [0.1, 0.3], "o_proj": [0.2, 0.05]}, "blocks": [0.1, 0.4]}
    assert math.isclose(sum(all_errors(found)), 0.65)


def test_other_models_are_refused(tiny_model: Path, ids: Tensor) -> None:
    with pytest.raises(InputError, match=r"num_hidden_layers is 5 in .* and 2 in .*choose the model that"):
        layer_errors("demo", tiny_model, ids)
