"""Checkpoints with wrong experts: every command refuses them in the same line, before weights are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.expert_check import check_experts
from quantkit.reference import load_tokenizer
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.startup import start_engine
from quantkit.sources import model_folder
from tiny_models import WITH_EXPERTS

Cli = Callable[..., tuple[int, str, str]]
Tensors = dict[str, Tensor]
FamilyModel = Callable[[str], Path]


def wrong(source: Path, target: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy of a model with other tensors and another config.json."""
    shutil.copytree(source, target)
    load_tokenizer(model_folder("demo-draft")).save_pretrained(target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def shaped(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def as_they_are(_: Tensors) -> None: ...


MIXTRAL = "model.layers.1.block_sparse_moe"
DEEPSEEK = "model.layers.1.mlp"
# Family, change of tensors, change of config.json, the line that every command says.
WRONG: dict[str, tuple[str, Callable[[Tensors], object], dict[str, Any], str]] = {
    "an expert is missing": (
        "mixtral", without(f"{MIXTRAL}.experts.3.w2.weight"), {},
        f"tensor {MIXTRAL}.experts.3.w2.weight is missing in FOLDER; the checkpoint is incomplete",
    ),
    "an expert of another shape": (
        "mixtral", shaped(f"{MIXTRAL}.experts.3.w2.weight", 64, 32), {},
        f"tensor {MIXTRAL}.experts.3.w2.weight in FOLDER has shape [64, 32], but config.json asks for [64, 96]",
    ),
    "no router": (
        "mixtral", without(f"{MIXTRAL}.gate.weight"), {},
        f"tensor {MIXTRAL}.gate.weight is missing in FOLDER; the checkpoint is incomplete",
    ),
    "a router wider than the experts": (
        "mixtral", shaped(f"{MIXTRAL}.gate.weight", 6, 64), {},
        f"tensor {MIXTRAL}.gate.weight in FOLDER has shape [6, 64], but config.json asks for [4, 64]",
    ),
    "a router narrower than the experts": (
        "mixtral", shaped(f"{MIXTRAL}.gate.weight", 3, 64), {},
        f"tensor {MIXTRAL}.gate.weight in FOLDER has shape [3, 64], but config.json asks for [4, 64]",
    ),
    "a correction of another length": (
        "deepseek_v3", shaped(f"{DEEPSEEK}.gate.e_score_correction_bias", 5), {},
        f"tensor {DEEPSEEK}.gate.e_score_correction_bias in FOLDER has shape [5], but config.json asks for [6]",
    ),
    "fewer experts than the files have": (
        "mixtral", as_they_are, {"num_local_experts": 3},
        "tensor model.layers.0.block_sparse_moe.gate.weight in FOLDER has shape [4, 64], but config.json asks for "
        "[3, 64]",
    ),
    "more chosen than there are": (
        "mixtral", as_they_are, {"num_experts_per_tok": 5},
        "config.json: 'num_experts_per_tok' is 5, but there are 4 experts",
    ),
    "an unknown scoring function": (
        "deepseek_v3", as_they_are, {"scoring_func": "tanh"},
        "config.json: 'scoring_func' is 'tanh', but routers of model_type 'deepseek_v3' know only sigmoid; "
        "use another engine",
    ),
    "groups that do not divide": (
        "deepseek_v3", as_they_are, {"n_group": 4},
        "config.json: 'n_group' is 4, which does not divide 6 experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_every_command_refuses_in_the_same_line(
    case: str, family_model: FamilyModel, run_cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, change, config, line = WRONG[case]
    folder = wrong(family_model(family), tmp_path / "wrong", change, **config)
    capsys.readouterr()  # transformers tells of its own writing
    doors: tuple[tuple[object, ...], ...] = (
        ("inspect", folder),
        ("quantize", folder, "-r", "rtn-w4g32", "-o", tmp_path / "out"),
        ("eval", folder, "--device", "cpu"),
        ("generate", folder, "Hello", "--device", "cpu"),
    )
    for door in doors:
        assert run_cli(*door) == (2, "", f"quantkit: {line.replace('FOLDER', str(folder))}\n"), door[0]
    with pytest.raises(InputError) as caught:  # what `serve` starts in the engine's process
        start_engine(folder, EngineOptions(device="cpu"))
    assert str(caught.value) == line.replace("FOLDER", str(folder))
    assert not (tmp_path / "out").exists()


def test_quantized_experts_are_checked_too(family_model: FamilyModel, tmp_path: Path) -> None:
    quantkit.quantize(family_model("mixtral"), "nf4", tmp_path / "nf4", quality_windows=0)
    one, other = f"{MIXTRAL}.experts.3.w1", f"{MIXTRAL}.experts.3.w2"

    def swap(tensors: Tensors) -> None:
        parts = [name.removeprefix(one) for name in tensors if name.startswith(f"{one}.")]
        for part in parts:
            tensors[one + part] = tensors[other + part].clone()

    folder = wrong(tmp_path / "nf4", tmp_path / "swapped", swap)
    for look in (quantkit.load_reference, lambda folder: start_engine(folder, EngineOptions(device="cpu"))):
        with pytest.raises(InputError, match=rf"{one}.weight in .* has shape \[64, 96\], but .* \[96, 64\]"):
            look(folder)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_nothing_is_said_of_what_transformers_saves(
    family: str, family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no tensor is read for it."""
    checkpoint = Checkpoint(family_model(family))
    monkeypatch.setattr(checkpoint, "tensor", lambda name: pytest.fail(f"read {name}"))
    check_experts(checkpoint)
