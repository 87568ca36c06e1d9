"""gpt-oss: experts that files keep in one tensor, in 16 bits or as MXFP4 blocks, are read as if one by one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.convert import convert
from quantkit.errors import CannotHold, InputError
from quantkit.formats import BlockMxfp4, CtMxfp4
from quantkit.inspection import inspect_checkpoint
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine

IDS = torch.randint(3, 110, (40,), generator=torch.Generator().manual_seed(1))
EXPERTS = "model.layers.1.mlp.experts"
FamilyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(family_model: FamilyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As OpenAI publishes it: experts in MXFP4 blocks, the rest in bfloat16."""
    folder = tmp_path_factory.mktemp("published")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(family_model("gpt_oss") / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed = [BlockMxfp4().encode(expert.T) for expert in tensor]
            tensors |= {f"{name}_{part}": torch.stack([each[part] for each in packed]) for part in packed[0]}
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((family_model("gpt_oss") / "config.json").read_text()) | {"dtype": "bfloat16"}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS[None]).logits[0].float()
    return found


def test_an_expert_is_a_slice_of_what_is_stored(family_model: FamilyModel) -> None:
    stored = load_file(family_model("gpt_oss") / "model.safetensors")
    checkpoint = Checkpoint(family_model("gpt_oss"))
    gate_up, bias = stored[f"{EXPERTS}.gate_up_proj"], stored[f"{EXPERTS}.gate_up_proj_bias"]
    assert torch.equal(checkpoint.tensor(f"{EXPERTS}.2.gate_proj.weight"), gate_up[2].T[0::2])
    assert torch.equal(checkpoint.tensor(f"{EXPERTS}.2.up_proj.weight"), gate_up[2].T[1::2])
    assert torch.equal(checkpoint.tensor(f"{EXPERTS}.2.up_proj.bias"), bias[2, 1::2])
    assert torch.equal(checkpoint.tensor(f"{EXPERTS}.3.down_proj.weight"), stored[f"{EXPERTS}.down_proj"][3].T)
    assert f"{EXPERTS}.gate_up_proj" not in checkpoint.tensors
    for name, each in checkpoint.tensors.items():
        assert checkpoint.tensor(name).shape == each.info.shape
    assert sum(each.nbytes for each in checkpoint.tensors.values()) == sum(each.nbytes for each in stored.values())


def test_published_blocks_mean_what_transformers_makes_of_them(published: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    theirs = AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    checkpoint = Checkpoint(published)
    assert len(checkpoint.formats) == 2 * 4 * 3
    gate = checkpoint.weight(f"{EXPERTS}.2.gate_proj", torch.bfloat16)
    assert torch.equal(theirs.model.layers[1].mlp.experts.gate_up_proj[2].T[0::2], gate)
    ours = quantkit.load_reference(published, "float32")
    torch.testing.assert_close(logits(ours), logits(theirs.float()), rtol=0, atol=1e-4)


def test_the_engine_runs_published_blocks(published: Path) -> None:
    engine = start_engine(published, EngineOptions(device="cpu", dtype="float32"))
    expected = logits(quantkit.load_reference(published, "float32"))
    torch.testing.assert_close(score_tokens(engine, IDS, 13), expected, rtol=0, atol=1e-4)


def test_both_layouts_of_mxfp4_decode_alike(published: Path, tmp_path: Path) -> None:
    report = convert(published, "ct-mxfp4", tmp_path / "ct")
    assert (report.source_format, report.target_format, report.layers) == ("mxfp4", "ct-mxfp4", 24)
    before, after = Checkpoint(published), Checkpoint(tmp_path / "ct")
    assert set(after.formats.values()) == {CtMxfp4()}
    for module in before.formats:
        assert torch.equal(after.weight(module), before.weight(module))
    assert torch.equal(after.tensor(f"{EXPERTS}.1.up_proj.bias"), before.tensor(f"{EXPERTS}.1.up_proj.bias"))


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "rtn-w4g32"])
def test_quantized_experts_run_as_their_reference(recipe: str, family_model: FamilyModel, tmp_path: Path) -> None:
    quantkit.quantize(family_model("gpt_oss"), recipe, tmp_path / "out", quality_windows=0)
    engine = start_engine(tmp_path / "out", EngineOptions(device="cpu", dtype="float32"))
    expected = logits(quantkit.load_reference(tmp_path / "out", "float32"))
    torch.testing.assert_close(score_tokens(engine, IDS, 13), expected, rtol=0, atol=1e-4)


def test_who_loads_it(published: Path, family_model: FamilyModel, tmp_path: Path) -> None:
    """The files of others load everywhere; ours have experts one by one."""
    inspected = inspect_checkpoint(published)
    assert inspected.schemes == {"mxfp4 MXFP4 b32": 24}
    assert inspected.quantized_bits_per_weight == 4.25
    assert [one.engine for one in inspected.engines if not one.loads] == ["TGI", "llama.cpp", "Ollama"]
    convert(published, "ct-mxfp4", tmp_path / "ct")
    said = [verdict for verdict in inspect_checkpoint(tmp_path / "ct").engines if "one by one" in verdict.remark]
    assert {verdict.engine for verdict in said if verdict.loads is False} == {"transformers", "vLLM", "SGLang"}


def test_the_published_layout_is_not_written(family_model: FamilyModel, tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("summary: gpt-oss's layout.\nmethod: rtn\nformat: {name: mxfp4}\n")
    with pytest.raises(CannotHold, match="use the format ct-mxfp4"):
        quantkit.quantize(family_model("gpt_oss"), str(recipe), tmp_path / "out")


def test_a_missing_part_is_named(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    del tensors[f"{EXPERTS}.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(InputError, match=rf"{EXPERTS}.0.down_proj in .* part 'scales' is missing"):
        Checkpoint(tmp_path).weight(f"{EXPERTS}.0.down_proj")
