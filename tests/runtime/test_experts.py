"""Models with experts on a CPU: how layers may differ, what loading tries, what is refused, and who guesses for them.

Tokens and logits of these families are compared where all families are: `test_engine_equality.py`,
`test_scoring.py`, `test_engine_formats.py`.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import checkpoint as checkpoint_module
from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError, QuantkitError, StorageError
from quantkit.formats import LlmInt8
from quantkit.kernels.linear.op import prepare
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.experts import ExpertMlp
from quantkit.runtime.model.loading import load_weights
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.reader import try_layer
from quantkit.runtime.parallel.rank_memory import rank_weight_bytes, resident_bytes
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from quantkit.stages import Stage
from tiny_models import SETTINGS, WITH_EXPERTS, save_model

CPU = torch.device("cpu")
IDS = torch.randint(3, 110, (40,), generator=torch.Generator().manual_seed(1))
EXPERT = "model.layers.1.mlp.experts.4"
FamilyModel = Callable[[str], Path]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
        ("qwen2_moe", {"num_experts": 1, "num_experts_per_tok": 1, "qkv_bias": False}),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 3}),
        ("qwen3_moe", {"num_experts_per_tok": 8, "mlp_only_layers": [1]}),
        ("mixtral", {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1}),
        ("glm4_moe", {"norm_topk_prob": False, "n_shared_experts": 1, "partial_rotary_factor": 1.0}),
    ],
    ids=str,
)
def test_settings_of_experts(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Dense layers between, all experts at once, only one, weights that are divided by their sum or not."""
    model = save_model(family, tmp_path, **SETTINGS[family] | changes)
    engine = start_engine(tmp_path, EngineOptions(device="cpu", dtype="float32"))
    torch.testing.assert_close(score_tokens(engine, IDS, 13), model(IDS[None]).logits[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_an_expert_of_all_tokens_and_one_of_none(tmp_path: Path) -> None:
    """Hidden states that share a direction, and a router that looks at nothing else."""
    model = save_model("qwen3_moe", tmp_path, **SETTINGS["qwen3_moe"])
    model.model.embed_tokens.weight += 3.0
    for layer in model.model.layers:
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        layer.self_attn.o_proj.weight *= 0.01
        layer.mlp.gate.weight[1] = 1.0
        layer.mlp.gate.weight[6] = -1.0
    model.save_pretrained(tmp_path)
    engine = start_engine(tmp_path, EngineOptions(device="cpu", dtype="float32"))
    seen: Counter[int] = Counter()
    mlp = engine.runner.decoder.weights.blocks[0].mlp
    assert isinstance(mlp, ExpertMlp)
    numbers = {id(expert): number for number, expert in enumerate(mlp.experts)}
    run = engine.runner.decoder._term

    def watched(expert: Any, x: Tensor) -> Tensor:
        seen[numbers.get(id(expert), -1)] += len(x)
        return run(expert, x)

    engine.runner.decoder._term = watched  # type: ignore[method-assign]
    torch.testing.assert_close(score_tokens(engine, IDS), model(IDS[None]).logits[0], rtol=0, atol=1e-4)
    assert seen[1] == len(IDS)
    assert seen[6] == 0


@pytest.mark.parametrize("how", ["self=rtn-w4g32", "self=nf4", "ngram"])
def test_guesses_change_nothing(how: str, family_model: FamilyModel) -> None:
    prompts = [IDS[:9].tolist(), IDS[15:].tolist()]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for speculative in (None, f"{how},k=3,adaptive=off" if "=" in how else "ngram"):
        llm = LLM(family_model("qwen2_moe"), device="cpu", max_context=64, speculative=speculative)
        found.append([generation.answers[0].token_ids for generation in llm.generate(prompts, params)])
    assert found[0] == found[1]
    assert how == "ngram" or llm.engine.speculation.accepted > 0


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_plans_know_what_experts_take(family: str, family_model: FamilyModel) -> None:
    """Before anything is loaded, from the files; of two stages each its own blocks, of ranks each its own experts."""
    checkpoint = Checkpoint(family_model(family))
    config = read_model_config(checkpoint.config)
    weights = load_weights(checkpoint, config, torch.float32, CPU)
    assert resident_bytes(weights) == weight_bytes(checkpoint, torch.float32)
    biased = FAMILIES[family].qkv_bias != "never" or FAMILIES[family].mlp_bias != "never"
    for ranks in (Ranks(1, 2), Ranks(1, 2, 1), Ranks(2, experts=True), Ranks(2, rank=1, experts=True)):
        part = load_weights(checkpoint, config, torch.float32, CPU, ranks=ranks)
        planned = rank_weight_bytes(checkpoint, config, torch.float32, ranks)
        rounded = 1024 if biased and ranks.tensor > 1 else 0  # biases of sums, which rank 0 alone has
        assert abs(resident_bytes(part) - planned) <= rounded


@pytest.mark.parametrize(
    ("family", "channels", "decoded"),
    [
        ("mixtral", 2 * 96, 4 * 96),
        ("qwen2_moe", 3 * 32 + 64, 6 * 32),
        ("qwen3_moe", 64, 8 * 32),
        ("glm4_moe", 3 * 32 + 64, 6 * 32),
    ],
)
def test_activations_of_a_token(family: str, channels: int, decoded: int, family_model: FamilyModel) -> None:
    """Those of all its experts; prompts decode gate and up of all experts of a layer together."""
    config = read_model_config(Checkpoint(family_model(family)).config)
    assert (config.token_channels, config.decoded_weights) == (channels, 2 * 64 * decoded)
    assert config.routed_channels == 64 * (3 if family in ("qwen2_moe", "glm4_moe") else 2)


def test_files_are_opened_once_for_a_block(family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(family_model("qwen3_moe"))
    config = read_model_config(checkpoint.config)
    opened: list[Path] = []
    real = checkpoint_module.safe_open
    monkeypatch.setattr(
        checkpoint_module, "safe_open", lambda file, framework: opened.append(file) or real(file, framework=framework)
    )
    load_weights(checkpoint, config, torch.float32, CPU)
    outside = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    assert len(opened) == config.layers + len(outside)


def test_few_rows_of_a_layer_tell_what_is_wrong() -> None:
    """Experts after the first are compared in some rows only; a NaN in any row, and another kernel, are found."""
    fmt, random = LlmInt8(), torch.Generator().manual_seed(0)
    good, other = (fmt.quantize(torch.randn(300, 64, generator=random)) for _ in range(2))
    weight = prepare(fmt, good, torch.float32)
    try_layer("good", fmt, good, weight, torch.float32, CPU, rows=128)
    with pytest.raises(QuantkitError, match=r"layer other would give garbage: its kernel is off by"):
        try_layer("other", fmt, other, weight, torch.float32, CPU, rows=128)
    good.row_absmax[290] = float("nan")
    with pytest.raises(QuantkitError, match=r"layer bad would give garbage: its weights decode to NaN"):
        try_layer("bad", fmt, good, prepare(fmt, good, torch.float32), torch.float32, CPU, rows=128)


def changed(source: Path, target: Path, tensors: dict[str, Tensor | None], **settings: Any) -> Path:
    """A copy with other tensors (None: without it) and other settings."""
    shutil.copytree(source, target)
    stored = load_file(source / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(config))
    return target


WRONG: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], str]] = {
    "missing": ({f"{EXPERT}.up_proj.weight": None}, {}, f"tensor {EXPERT}.up_proj.weight is missing"),
    "misshapen": (
        {f"{EXPERT}.down_proj.weight": torch.zeros(64, 31)},
        {},
        rf"tensor {EXPERT}.down_proj.weight in .* has shape \[64, 31\], but config.json asks for \[64, 32\]",
    ),
    "fewer rows of the router": (
        {"model.layers.1.mlp.gate.weight": torch.zeros(5, 64)},
        {},
        r"tensor model.layers.1.mlp.gate.weight in .* has shape \[5, 64\], but config.json asks for \[6, 64\]",
    ),
    "more experts in config.json": ({}, {"num_experts": 7}, r"has shape \[6, 64\], but config.json asks for \[7, 64\]"),
    "fewer experts in config.json": (
        {},
        {"num_experts": 5},
        r"has shape \[6, 64\], but config.json asks for \[5, 64\]",
    ),
    "gate of the shared expert": (
        {"model.layers.1.mlp.shared_expert_gate.weight": None},
        {},
        "tensor model.layers.1.mlp.shared_expert_gate.weight is missing",
    ),
    "more chosen than there are": (
        {},
        {"num_experts_per_tok": 9},
        "'num_experts_per_tok' is 9, but there are 6 experts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_checkpoints(name: str, family_model: FamilyModel, tmp_path: Path) -> None:
    tensors, settings, message = WRONG[name]
    folder = changed(family_model("qwen2_moe"), tmp_path / "wrong", tensors, **settings)
    with pytest.raises((StorageError, InputError), match=message) as caught:
        start_engine(folder, EngineOptions(device="cpu"))
    assert "\n" not in str(caught.value)


def test_layers_of_other_roles(family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of one stage but not of the other, and a shared expert without others."""
    config = Checkpoint(family_model("qwen2_moe")).config
    family = FAMILIES["qwen2_moe"]
    routed, dense = family.stages(1, config), family.stages(0, config)
    wrong: tuple[tuple[Stage, ...], ...] = ((*routed[:3], dense[3]), (*dense, *routed[4:]), (*routed, routed[0]))
    for stages in wrong:
        monkeypatch.setattr(type(family), "stages", lambda *_, stages=stages: stages)
        with pytest.raises(InputError, match=r"'qwen2_moe' cannot be run: layer 0 consists of qkv, output, gate_up"):
            read_model_config(config)
