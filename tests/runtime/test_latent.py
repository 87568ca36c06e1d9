"""Models with latent attention on a CPU: every form of it, what a cache keeps, what loading decodes, what is refused.

Tokens and logits of whole engines are compared where all families are: `test_engine_equality.py`, `test_scoring.py`,
`test_engine_formats.py`.
"""

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
from quantkit.errors import InputError, StorageError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.experts import ExpertMlp
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.weight_sizes import tensor_bytes
from quantkit.runtime.parallel.rank_memory import rank_weight_bytes, resident_bytes
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from tiny_models import SETTINGS, WITH_LATENTS, save_model

CPU = torch.device("cpu")
IDS = torch.randint(3, 110, (40,), generator=torch.Generator().manual_seed(1))
YARN = SETTINGS["deepseek_v3"]["rope_parameters"]
FamilyModel = Callable[[str], Path]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale_all_dim": 0.0}, "norm_topk_prob": False}),
        ("deepseek_v3", {"first_k_dense_replace": 0, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}),
        ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "greedy", "rope_parameters": YARN}),
        ("deepseek_v2", {"attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1}),
    ],
    ids=str,
)
def test_settings_of_latent_attention(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Queries from a latent or not, both orders of rope, YaRN in scores or not, biases of some linears only."""
    model = save_model(family, tmp_path, **SETTINGS[family] | changes)
    engine = start_engine(tmp_path, EngineOptions(device="cpu", dtype="float32"))
    torch.testing.assert_close(score_tokens(engine, IDS, 13), model(IDS[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", WITH_LATENTS)
def test_a_token_costs_a_latent_and_a_key(family: str, family_model: FamilyModel) -> None:
    engine = start_engine(family_model(family), EngineOptions(device="cpu", kv_tokens=64, max_context=64))
    cache, plan = engine.runner.cache, engine.memory
    assert cache.pages.shape == (2, 1, 64 // cache.page_size + 1, 1, cache.page_size, 32 + 8)
    assert cache.pages.nbytes == plan.pages * plan.page_bytes


def test_an_8_bit_cache(family_model: FamilyModel) -> None:
    """Its logits are those of a cache in full, but for rounding."""
    found = []
    for kv_dtype in ("auto", "fp8"):
        options = EngineOptions(device="cpu", dtype="float32", kv_dtype=kv_dtype)
        found.append(score_tokens(start_engine(family_model("deepseek_v2"), options), IDS, 11))
    assert 1e-3 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.2


@pytest.mark.parametrize("how", ["self=rtn-w4g32", "ngram"])
def test_guesses_change_nothing(how: str, family_model: FamilyModel) -> None:
    prompts = [IDS[:9].tolist(), IDS[15:].tolist()]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for speculative in (None, f"{how},k=3,adaptive=off" if "=" in how else how):
        llm = LLM(family_model("deepseek_v3"), device="cpu", max_context=64, speculative=speculative)
        found.append([generation.answers[0].token_ids for generation in llm.generate(prompts, params)])
    assert found[0] == found[1]
    assert how == "ngram" or llm.engine.speculation.accepted > 0


def test_plans_know_what_is_kept_in_float32(family_model: FamilyModel) -> None:
    """Before anything is loaded, from the files; of two stages each its own blocks."""
    checkpoint = Checkpoint(family_model("deepseek_v3"))
    config = read_model_config(checkpoint.config)
    dtype = torch.bfloat16
    weights = load_weights(checkpoint, config, dtype, CPU)
    assert resident_bytes(weights) == weight_bytes(checkpoint, dtype)
    for rank in range(2):
        part = load_weights(checkpoint, config, dtype, CPU, ranks=Ranks(1, 2, rank))
        assert resident_bytes(part) == rank_weight_bytes(checkpoint, config, dtype, Ranks(1, 2, rank))
    mlp = weights.blocks[1].mlp
    assert isinstance(mlp, ExpertMlp)
    assert mlp.correction is not None
    assert mlp.correction.dtype == mlp.router.weights[0].dtype == torch.float32


def test_what_makes_keys_and_values_is_decoded(family_model: FamilyModel, tmp_path: Path) -> None:
    """It is no linear on the device, and plans count it so."""
    quantkit.quantize(family_model("deepseek_v3"), "rtn-w4g32", tmp_path / "out", quality_windows=0)
    checkpoint, module = Checkpoint(tmp_path / "out"), "model.layers.0.self_attn.kv_b_proj"
    sizes = tensor_bytes(checkpoint, torch.bfloat16)
    assert sum(sizes[name] for name in checkpoint.part_names(module)) == 2 * 4 * (24 + 16) * 32
    block = load_weights(checkpoint, read_model_config(checkpoint.config), torch.float32, CPU).blocks[0]
    assert block.latent is not None
    both = torch.cat((block.latent.key_up, block.latent.value_up), dim=1)
    assert torch.equal(both.flatten(0, 1), checkpoint.weight(module, torch.float32))


def test_a_layer_that_guesses_is_left_alone(family_model: FamilyModel, tmp_path: Path) -> None:
    """Published files have one after the last; it is neither loaded nor quantized, and stays in the files."""
    extra: dict[str, Tensor | None] = {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    source = family_model("deepseek_v3")
    folder = changed(source, tmp_path / "more", extra, num_nextn_predict_layers=1)
    assert weight_bytes(Checkpoint(folder), torch.float32) == weight_bytes(Checkpoint(source), torch.float32)
    quantkit.quantize(folder, "rtn-w4g32", tmp_path / "out", quality_windows=0)
    assert "model.layers.2.eh_proj.weight" in Checkpoint(tmp_path / "out").plain_names()
    start_engine(tmp_path / "out", EngineOptions(device="cpu"))
    without = changed(source, tmp_path / "without", extra, num_nextn_predict_layers=0)
    with pytest.raises(InputError, match=r"model.layers.2.eh_proj.weight, which config.json knows nothing of"):
        quantkit.quantize(without, "rtn-w4g32", tmp_path / "no", quality_windows=0)


def changed(source: Path, target: Path, tensors: dict[str, Tensor | None], **settings: Any) -> Path:
    """A copy with other tensors (None: without it) and other settings."""
    shutil.copytree(source, target)
    stored = load_file(source / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(config))
    return target


GATE = "model.layers.1.mlp.gate"
UP = "model.layers.0.self_attn.kv_b_proj.weight"
WRONG: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], str]] = {
    "no correction": ({f"{GATE}.e_score_correction_bias": None}, {}, f"{GATE}.e_score_correction_bias is missing"),
    "short correction": (
        {f"{GATE}.e_score_correction_bias": torch.zeros(7)},
        {},
        rf"{GATE}.e_score_correction_bias in .* has shape \[7\], but config.json asks for \[6\]",
    ),
    "wide router": ({f"{GATE}.weight": torch.zeros(9, 64)}, {}, rf"{GATE}.weight in .* has shape \[9, 64\]"),
    "missing up": ({UP: None}, {}, f"{UP} is missing"),
    "another up": ({UP: torch.zeros(160, 31)}, {}, rf"{UP} in .* has shape \[160, 31\], but .* \[160, 32\]"),
    "another rank": ({}, {"kv_lora_rank": 16}, r"kv_a_proj_with_mqa.weight in .* has shape \[40, 64\]"),
    "expert": ({"model.layers.1.mlp.experts.5.up_proj.weight": None}, {}, "experts.5.up_proj.weight is missing"),
    "groups": ({}, {"n_group": 4}, "'n_group' is 4, which does not divide 6 experts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_checkpoints(name: str, family_model: FamilyModel, tmp_path: Path) -> None:
    tensors, settings, message = WRONG[name]
    folder = changed(family_model("deepseek_v3"), tmp_path / "wrong", tensors, **settings)
    with pytest.raises((StorageError, InputError), match=message) as caught:
        start_engine(folder, EngineOptions(device="cpu"))
    assert "\n" not in str(caught.value)
