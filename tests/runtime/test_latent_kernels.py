"""Latent attention on the kernels that a GPU runs, in whole engines: interpreted here, and on a GPU as they are.

The kernels themselves are compared with their meaning in `tests/kernels`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from long_cases import others_long
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.plan.on_gpu import look_on_gpu
from quantkit.eval.shapes import SHAPES
from quantkit.kernels.attention.latent.attend import attend_latents
from quantkit.kernels.attention.latent.expanded import attend_expanded
from quantkit.kernels.attention.latent.rotate import rotate_latent
from quantkit.kernels.reference import latent as reference
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device import build, memory
from quantkit.runtime.device.prompt_graphs import PromptGraphs
from quantkit.runtime.device.step_inputs import StepInputs
from quantkit.runtime.drafters.setup import most_nodes
from quantkit.runtime.llm import LLM
from quantkit.runtime.model import latent_attention
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.ops import Ops, ops_for
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from tiny_models import SETTINGS, WITH_LATENTS, save_model

IDS = torch.randint(3, 110, (80,), generator=torch.Generator().manual_seed(1))
LONG = 10  # new tokens of a sequence, above which `model` expands latents
CLOSE = 3e-2  # relative error of logits in 16 bits
FamilyModel = Callable[[str], Path]


def latent_kernels(device: torch.device, dtype: torch.dtype) -> Ops:
    kernels = {"rotate_latent": rotate_latent, "attend_latents": attend_latents, "attend_expanded": attend_expanded}
    return replace(ops_for(device, dtype), **kernels)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Engines are built on the kernels. Of every step: how many tokens were absorbed, how many expanded."""
    found: list[tuple[int, int]] = []
    divide = latent_attention.divide_step

    def watched(*args: Any) -> latent_attention.LatentStep:
        step = divide(*args)
        expanded = sum(pieces.num_new for pieces in step.expanded)
        found.append((len(args[0].ids) - expanded, expanded))
        return step

    monkeypatch.setattr("quantkit.runtime.model.decoder.divide_step", watched)
    monkeypatch.setattr(build, "ops_for", latent_kernels)
    return found


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(family)`: a tiny one with heads so small that more than LONG new tokens are expanded.

    Without experts: rounding would choose others now and then.
    """
    sizes = {"qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2}
    top = tmp_path_factory.mktemp("latents")

    def folder_of(family: str) -> Path:
        if not (top / family).exists():
            save_model(family, top / family, **SETTINGS[family] | sizes)
        return top / family

    return folder_of


@pytest.mark.parametrize(
    ("family", "step", "kv_dtype", "seen"),
    [
        ("deepseek_v2", 14, "auto", [(0, 14), (6, 0)]),
        ("deepseek_v3", 20, "fp8", [(0, 20)]),
    ],
)
def test_logits_of_prompts(
    family: str, step: int, kv_dtype: str, seen: list[tuple[int, int]], model: FamilyModel, forms: list[Any]
) -> None:
    """In chunks, of which long ones are expanded and later ones attend to latents of earlier ones."""
    options = EngineOptions(device="cpu", dtype="float16", kv_dtype=kv_dtype, max_context=32)
    engine = start_engine(model(family), options)
    if kv_dtype == "fp8":  # to which Triton's interpreter does not round
        engine.runner.decoder._ops = replace(engine.runner.decoder._ops, rotate_latent=reference.rotate_latent)
    found = score_tokens(engine, IDS[:20], step)
    assert forms == seen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ops_for", ops_for)
        wanted = score_tokens(start_engine(model(family), options), IDS[:20], step)
    assert relative_error(found, wanted) < CLOSE


WAYS: dict[str, dict[str, Any]] = {
    "chunked and shared": {"step_tokens": 20},
    "swapped": {"kv_tokens": 64, "step_tokens": 64, "swap_gib": 0.001},
    "guessed": {"speculative": "self=rtn-w4g32,k=2,adaptive=off"},
}


@pytest.mark.parametrize("way", others_long(list(WAYS), ("chunked and shared", "swapped")))
def test_answers_of_engines(way: str, model: FamilyModel, forms: list[Any]) -> None:
    """Prompts of both forms in one step, beside answers, with a shared prefix, by sequences that give way or guess."""
    options = {"device": "cpu", "max_context": 48, **WAYS[way]}
    ids = IDS.tolist()
    prompts = [ids[60:74], [*ids[:16], *ids[40:52]], ids[:20]]
    llm = LLM(model("deepseek_v2"), dtype="float16", **options)
    found = answers(llm, prompts)
    engine = llm.engine
    assert any(absorbed and expanded for absorbed, expanded in forms)
    assert (engine.scheduler.preemptions > 0) == (way == "swapped")
    assert engine.scheduler.reused_tokens > 0
    assert engine.speculation.accepted > 0 or way != "guessed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ops_for", ops_for)
        assert found == answers(LLM(model("deepseek_v2"), device="cpu", dtype="float16", max_context=48), prompts)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return [generation.answers[0].token_ids for generation in llm.generate(prompts, params)]


def test_where_expanding_pays() -> None:
    """DeepSeek's own sizes by hand: 512 x 256 / (2 x 512 - 256)."""
    sizes = latent_attention.LatentSizes(None, 512, 128, 64, 128, True)
    assert sizes.most_absorbed == pytest.approx(170.67, abs=0.01)
    assert replace(sizes, rank=128).most_absorbed == float("inf")


def test_trees_of_models_with_many_heads() -> None:
    sizes = {name: most_nodes(read_model_config(SHAPES[name])) for name in ("llama-3.1-8b", "deepseek-v3")}
    assert sizes == {"llama-3.1-8b": 64 // 4, "deepseek-v3": 62}


@pytest.mark.parametrize("family", WITH_LATENTS)
def test_graphs_of_prompts_leave_long_pieces_alone(family: str, model: FamilyModel) -> None:
    config = read_model_config(Checkpoint(model(family)).config)
    graphs = PromptGraphs.__new__(PromptGraphs)
    graphs._decoder = SimpleNamespace(config=config)  # type: ignore[assignment]
    for new, taken in ((LONG, True), (LONG + 1, False)):
        inputs = StepInputs(ids=[5] * (new + 1), starts=[0, 1, 1 + new])
        assert graphs.takes(inputs) == taken


def test_memory_of_a_gpu_has_room_to_expand(model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_model_config(Checkpoint(model("deepseek_v2")).config)
    room = memory.expanded_latent_bytes(config, torch.bfloat16, 64)
    assert room > 128 << 20
    options = EngineOptions(device="cpu", kv_tokens=64, max_context=64, max_sequences=4, step_tokens=64, graphs=False)
    planned = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(EngineOptions, "torch_device", torch.device(device))
        planned.append(memory.plan_memory(config, 0, torch.bfloat16, options, available=1 << 34).activations)
    assert planned[1] - planned[0] == room + memory._LIBRARIES


def test_what_gpus_take_and_refuse(family_model: FamilyModel, tmp_path: Path) -> None:
    for gpu in ("h100", "l4"):
        assert "no (needs" not in dict(look_on_gpu(family_model("deepseek_v2"), gpu).rows())["FP8 cache"]
    save_model("deepseek_v2", tmp_path, **SETTINGS["deepseek_v2"] | {"kv_lora_rank": 520})
    with pytest.raises(InputError, match=r"^latent attention: a token has 520 \+ 8 numbers, but a latent has 1 to 512"):
        look_on_gpu(tmp_path, "h100")


@pytest.mark.gpu
@pytest.mark.parametrize("family", WITH_LATENTS)
@pytest.mark.parametrize("step", [1, 13, 60, 80])
def test_logits_on_a_gpu(family: str, step: int, family_model: FamilyModel) -> None:
    """Token by token, in short chunks, in long ones, which are expanded, and whole; with experts.

    Of most tokens: rounding may choose other experts for one.
    """
    options = EngineOptions(device="cuda", dtype="float16", kv_tokens=4096, max_context=128)
    found = score_tokens(start_engine(family_model(family), options), IDS, step).cpu().float()
    wanted = score_tokens(start_engine(family_model(family), EngineOptions(device="cpu", dtype="float32")), IDS, step)
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < 1e-2
    assert float(errors.quantile(0.9)) < CLOSE


ON_GPU = WAYS | {
    "alone": {},
    "without graphs": {"graphs": False, "overlap": False},
    "8 bits": {"kv_dtype": "fp8"},
    "preempted": {"kv_tokens": 112},
    "swapped": {"kv_tokens": 112, "swap_gib": 0.001},
    "looked up": {"speculative": "ngram"},
    "unshared": {"share_prefixes": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_GPU)
def test_answers_on_a_gpu(way: str, model: FamilyModel) -> None:
    """Those of the CPU, up to the first place where rounding may choose."""
    folder, options = model("deepseek_v3"), {"max_context": 96, **ON_GPU[way]}
    ids = IDS.tolist()
    prompts = [ids[:5], [*ids[:32], *ids[40:70]], ids[:36], ids[:1], ids[:80]]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    sizes = {"kv_tokens": 4096} | options
    llm = LLM(folder, device="cuda", dtype="float16", **sizes)
    found = llm.generate(prompts, params)
    assert (llm.engine.scheduler.preemptions > 0) == (sizes["kv_tokens"] < 4096)
    shared = {name: value for name, value in options.items() if name in ("max_context", "kv_dtype")}
    wanted = LLM(folder, device="cpu", dtype="float32", **shared).generate(prompts, params)
    for one, other in zip(found, wanted, strict=True):
        expected = other.answers[0]
        assert expected.top_logprobs is not None
        for place, (token, right) in enumerate(zip(one.answers[0].token_ids, expected.token_ids, strict=True)):
            first, second = (value for _, value in expected.top_logprobs[place])
            if token != right:
                assert first - second < 0.25, f"{way}: token {place} is {token}, not {right}"
                break
