"""Models with experts: transformers keeps them in two tensors, files one by one; quantkit takes them as linears."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quantkit
from quantkit.arch import FAMILIES
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.expert_modules import SeparateExperts
from quantkit.inspection import inspect_checkpoint
from quantkit.recipe import load_recipe
from quantkit.reference import load_reference, load_tokenizer
from quantkit.sources import model_folder
from tiny_models import SETTINGS, WITH_EXPERTS, save_model

pytestmark = pytest.mark.usefixtures("few_scales")

FEW = Calibration(samples=8, seq_len=32)
EIGHT = ("format.name=ct-packed", "format.bits=8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """`models(family)`: a folder with a tokenizer, and the model that transformers saved there."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp("experts") / family
            made[family] = folder, save_model(family, folder, **SETTINGS[family], vocab_size=4096)
            load_tokenizer(model_folder("demo-draft")).save_pretrained(folder)
        return made[family]

    return make


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 4000, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, use_cache=False).logits
    return found


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_reference_computes_what_transformers_does(family: str, models: Any, tokens: Tensor) -> None:
    folder, model = models(family)
    found = load_reference(folder, "float32")
    assert any(isinstance(module, SeparateExperts) for module in found.modules())
    assert off_by(logits(found, tokens), logits(model, tokens)) < 1e-5


@pytest.mark.parametrize(
    ("family", "recipe", "most"),
    [
        ("mixtral", ("gptq-w4g32", *EIGHT), 0.2),
        ("qwen2_moe", ("awq-w4g32", *EIGHT), 0.1),
        ("qwen3_moe", ("rtn-w4g32", *EIGHT), 0.1),
        pytest.param("qwen2_moe", ("smoothquant-w8a8",), 0.2, marks=pytest.mark.long),
        pytest.param("mixtral", ("fp8",), 0.5, marks=pytest.mark.long),
        ("qwen3_moe", ("llm-int8",), 0.2),
        pytest.param("qwen2_moe", ("nf4",), 0.6, marks=pytest.mark.long),
        pytest.param("glm4_moe", ("gptq-w4g32", *EIGHT), 0.2, marks=pytest.mark.long),
        pytest.param("deepseek_v2", ("gptq-w4g32", *EIGHT), 0.2, marks=pytest.mark.long),
        ("deepseek_v3", ("awq-w4g32", *EIGHT), 0.2),
        pytest.param("gpt_oss", ("gptq-w4g32", *EIGHT), 0.1, marks=pytest.mark.long),
        ("gpt_oss", ("awq-w4g32", *EIGHT), 0.1),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else None,
)
def test_every_expert_is_quantized_and_read_back(
    family: str, recipe: tuple[str, ...], most: float, models: Any, tokens: Tensor, tmp_path: Path
) -> None:
    folder, model = models(family)
    quantkit.quantize(folder, load_recipe(recipe[0], recipe[1:]), tmp_path / "out", calibration=FEW, quality_windows=0)
    written = Checkpoint(tmp_path / "out")
    linears = FAMILIES[family].linears(written.config)
    assert set(written.formats) == set(linears)
    kept = [name for name in written.plain_names() if ".layers." in name and "norm" not in name and "bias" not in name]
    assert all(name.endswith(("gate.weight", "expert_gate.weight", "router.weight", "sinks")) for name in kept), kept
    assert inspect_checkpoint(tmp_path / "out").quantized_weights == sum(
        module.weight.numel()
        for name, module in load_reference(tmp_path / "out").named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("lm_head", "expert_gate"))
    )
    found = load_reference(tmp_path / "out", "float32", activations="served")
    assert off_by(logits(found, tokens), logits(model, tokens)) < most


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (("rtn-w4g32", "format.name=ct-packed"), "ignore"),
        (("rtn-w4g32", "format.name=awq", "format.sym=false"), "modules_to_not_convert"),
        (("nf4",), "llm_int8_skip_modules"),
        (("rtn-w4g32",), "dynamic"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_config_json_names_routers_and_gates(recipe: tuple[str, ...], key: str, models: Any, tmp_path: Path) -> None:
    """Engines would take them for quantized layers; of GPTQ they know, and its own lists are of other layers."""
    gates = [f"model.layers.1.mlp.{name}" for name in ("gate", "shared_expert_gate")]
    assert FAMILIES["qwen2_moe"].gates(Checkpoint(models("qwen2_moe")[0]).config) == gates
    quantkit.quantize(models("qwen2_moe")[0], load_recipe(recipe[0], recipe[1:]), tmp_path / "out", quality_windows=0)
    written = Checkpoint(tmp_path / "out").config["quantization_config"].get(key, [])
    assert [name for name in written if name != "lm_head"] == ([] if key == "dynamic" else gates)


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    tensors(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_an_expert_that_config_json_does_not_know_is_refused(models: Any, tmp_path: Path) -> None:
    """What else is refused of experts stands in `test_wrong_experts.py`."""
    shutil.copytree(models("mixtral")[0], tmp_path / "broken")
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    change(tmp_path / "broken", lambda found: found.update({name.format(4): found[name.format(3)].clone()}))
    with pytest.raises(InputError, match=rf"has a tensor {name.format(4)}, which config.json knows nothing of"):
        quantkit.quantize(tmp_path / "broken", "rtn-w4g32", tmp_path / "out", quality_windows=0)
    assert not (tmp_path / "out").exists()


def test_tensors_that_follow_from_the_config_are_no_fault(tmp_path: Path) -> None:
    """Llama's first files hold the frequencies of rope."""
    save_model("llama", tmp_path / "old")
    change(
        tmp_path / "old", lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    quantkit.quantize(tmp_path / "old", "rtn-w4g32", tmp_path / "out", quality_windows=0)
    assert len(Checkpoint(tmp_path / "out").formats) == 14
