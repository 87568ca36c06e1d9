"""Experts as routed kernels run them, against the same experts one after the other; on a GPU whole models too."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.eval.plan.on_gpu import look_on_gpu
from quantkit.formats import CtFloat8, CtPacked, LlmInt8, Nf4
from quantkit.kernels.card import KNOWN
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.grouped.weight import GroupedEightBit, GroupedHalf, GroupedPacked
from quantkit.kernels.reference.elementwise import gated_activation
from quantkit.kernels.reference.experts import sum_of_every_expert, sum_of_experts
from quantkit.recipe import load_recipe
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.card_plan import plan_card
from quantkit.runtime.model import loading
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.expert_stacks import formats_of_layers, slow_experts
from quantkit.runtime.model.experts import ExpertMlp, GroupedMlp
from quantkit.runtime.model.layers import DenseMlp, Weights
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.parallel.rank_memory import resident_bytes
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from tiny_models import SETTINGS, WITH_EXPERTS, WITH_LATENTS, save_model

CPU = torch.device("cpu")
IDS = torch.randint(3, 110, (40,), generator=torch.Generator().manual_seed(1))
FamilyModel = Callable[[str], Path]


def load(folder: Path, ranks: Ranks = Ranks()) -> Weights:  # noqa: B008  (a value)
    checkpoint = Checkpoint(folder)
    return loading.load_weights(checkpoint, read_model_config(checkpoint.config), torch.bfloat16, CPU, ranks=ranks)


def load_grouped(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks = Ranks()) -> Weights:  # noqa: B008
    """Stacked, though this is no GPU: Triton's interpreter runs the kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "has_routed_kernels", lambda device: True)
        return load(folder, ranks)


@pytest.fixture(autouse=True)
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What experts one after the other compute is the measure here, so kernels of the CPU do not round their inputs."""
    monkeypatch.setattr(installed, "can_compile", lambda: False)


def run_dense(mlp: DenseMlp, x: Tensor, clip: tuple[float, float] | None = None) -> Tensor:
    return mlp.down(gated_activation(mlp.gate_up(x), "silu", clip=clip))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`quantized(family, recipe)`: a tiny model with three experts in one layer, as wide as blocks of NF4 are long.

    With other `sizes` under a `name` of its own; unquantized without a recipe.
    """
    top = tmp_path_factory.mktemp("experts")

    def make(family: str, recipe: str | None, name: str = "", **sizes: int) -> Path:
        source = top / f"{family}{name}"
        folder = source if recipe is None else top / f"{family}{name}-{recipe}"
        if not source.exists():
            few = {"moe_intermediate_size": 64, "num_experts": 3, "mlp_only_layers": [0]}
            save_model(family, source, "bfloat16", **SETTINGS[family] | ({} if family == "gpt_oss" else few) | sizes)
        if not folder.exists():
            assert recipe is not None
            quantkit.quantize(source, load_recipe(recipe), folder, quality_windows=0)
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("mixtral", None),
        ("glm4_moe", None),
        ("gpt_oss", None),
        pytest.param("gpt_oss", "mxfp4", marks=pytest.mark.long),
        ("qwen2_moe", "rtn-w4g32"),
        ("qwen3_moe", "nf4"),
        ("qwen3_moe", "fp8"),
        ("qwen3_moe", "llm-int8"),
    ],
    ids=str,
)
def test_layers_mean_the_same(
    family: str,
    recipe: str | None,
    family_model: FamilyModel,
    quantized: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = family_model(family) if recipe is None else quantized(family, recipe)
    plain, grouped = load(folder), load_grouped(folder, monkeypatch)
    run = partial(run_dense, clip=read_model_config(Checkpoint(folder).config).clip)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    compared = 0
    for one, other in zip(plain.blocks, grouped.blocks, strict=True):
        if not isinstance(one.mlp, ExpertMlp):
            continue
        assert isinstance(other.mlp, GroupedMlp)
        packed = GroupedEightBit if recipe in ("fp8", "llm-int8") else GroupedPacked
        assert isinstance(other.mlp.down, GroupedHalf if recipe is None else packed)
        wanted, found = one.mlp(x, run).float(), other.mlp(x, run).float()
        largest = 3e-2 if recipe == "fp8" else 1e-2  # where a value between two steps of FP8 may fall to either side
        assert float((found - wanted).norm() / wanted.norm()) < largest
        compared += 1
    assert compared == (2 if family in ("mixtral", "gpt_oss") else 1)
    if recipe is None:
        assert resident_bytes(grouped) <= resident_bytes(plain) + (1 << 16)  # tickets


@pytest.mark.parametrize(("family", "recipe"), [("mixtral", None), ("qwen2_moe", "rtn-w4g32")], ids=str)
def test_ranks_add_up(
    family: str,
    recipe: str | None,
    family_model: FamilyModel,
    quantized: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stacks its own experts alone, three on two ranks unevenly; shared experts are cut."""
    folder = family_model(family) if recipe is None else quantized(family, recipe)
    wanted = load(folder).blocks[1].mlp
    assert isinstance(wanted, ExpertMlp)
    parts = [load_grouped(folder, monkeypatch, Ranks(2, rank=rank, experts=True)).blocks[1].mlp for rank in (0, 1)]
    for tokens in (1, 20):  # the router's own launch, and that of many
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        total = sum(part(x, run_dense).float() for part in parts)
        expected = wanted(x, run_dense).float()
        assert float((total - expected).norm() / expected.norm()) < 1e-2
    counts = [part.down.count for part in parts if isinstance(part, GroupedMlp)]
    assert counts == ([2, 2] if recipe is None else [2, 1])


def test_a_whole_model(family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(device="cpu", dtype="bfloat16")
    plain = score_tokens(start_engine(family_model("qwen2_moe"), options), IDS[:4])
    monkeypatch.setattr(loading, "has_routed_kernels", lambda device: True)
    grouped = score_tokens(start_engine(family_model("qwen2_moe"), options), IDS[:4])
    assert float((grouped - plain).norm() / plain.norm()) < 3e-2


def test_a_broken_expert_is_refused_by_its_name(
    quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = quantized("qwen2_moe", "rtn-w4g32"), Checkpoint.quantized

    def broken(self: Checkpoint, module: str, device: str | torch.device = "cpu") -> object:
        weight = read(self, module, device)
        if module.endswith("experts.2.up_proj"):
            weight.scales[5] = float("nan")  # type: ignore[attr-defined]
        return weight

    monkeypatch.setattr(Checkpoint, "quantized", broken)
    with pytest.raises(QuantkitError, match=r"layer model.layers.1.mlp.experts.2.up_proj would give garbage"):
        load_grouped(folder, monkeypatch)


def test_every_expert_of_every_token() -> None:
    """What a GPU does without a routed kernel; an expert that overflows for others' tokens spoils nothing."""
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 16, generator=random), torch.rand(7, 2, generator=random)
    chosen = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(7)])
    chosen[chosen == 1] = 3
    chosen[0] = torch.tensor([0, 1])
    experts = [lambda x, factor=factor: x * factor for factor in (1.0, 2.0, -1.5, 0.5)]
    experts[1] = lambda x: torch.where(torch.arange(len(x))[:, None] > 0, float("inf"), 2 * x) if len(x) > 1 else 2 * x
    wanted = sum_of_experts(x, chosen, weights, experts)
    torch.testing.assert_close(sum_of_every_expert(x, chosen, weights, experts), wanted)


def test_a_gpu_runs_experts_and_says_which_are_slow(family_model: FamilyModel) -> None:
    assert look_on_gpu(family_model("mixtral"), "h100").plan.warnings == ()
    assert look_on_gpu(family_model("gpt_oss"), "h100").plan.warnings == ()
    config = read_model_config(Checkpoint(family_model("qwen2_moe")).config)
    experts = [
        name for name in config.family.linears(Checkpoint(family_model("qwen2_moe")).config) if "experts" in name
    ]
    attention = dict.fromkeys(["model.layers.1.self_attn.q_proj"], LlmInt8())
    for fmt in (CtPacked(group_size=32), CtFloat8(), LlmInt8()):
        formats = attention | dict.fromkeys(experts, fmt)
        assert slow_experts(config, formats) == []
        assert formats_of_layers(config, formats) == [LlmInt8()]  # what a card decodes where it has no FP8
    mixed = dict.fromkeys(experts, Nf4()) | {experts[0]: CtPacked(group_size=32)}
    assert slow_experts(config, mixed) == ["they are in different formats"]
    (line,) = plan_card(KNOWN["sm_90"], [], slow_experts=slow_experts(config, mixed)).warnings
    assert line.startswith(
        "experts have no routed kernel, since they are in different formats: every step computes all"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "rtn-w4g32", "nf4", "mxfp4", "fp8", "llm-int8"])
@pytest.mark.parametrize("family", [name for name in WITH_EXPERTS if name not in WITH_LATENTS])
def test_a_whole_model_on_a_gpu(family: str, recipe: str | None, quantized: Callable[..., Path]) -> None:
    """Prompt and answers, with and without CUDA graphs, against float32 on the CPU; heads are such as its kernels take.

    Of most tokens: rounding may choose other experts for one.
    """
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    folder = quantized(family, recipe, "-wide", **heads)
    wanted = score_tokens(start_engine(folder, EngineOptions(device="cpu", dtype="float32")), IDS)
    for graphs in (True, False):
        options = EngineOptions(device="cuda", dtype="bfloat16", graphs=graphs, kv_tokens=4096, max_context=128)
        found = score_tokens(start_engine(folder, options), IDS, 13).cpu().float()
        errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(errors.median()) < {"fp8": 0.25, "llm-int8": 0.1}.get(recipe or "", 0.04)  # of inputs in 8 bits
