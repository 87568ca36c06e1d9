"""Every checkpoint that our quantizers write, and those of other tools, is served as its format means it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from long_cases import others_long
from quantkit import load_reference
from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.recipe import Recipe, list_recipes, load_recipe
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.startup import start_engine

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
NEW_TOKENS = 12
# Relative error of logits where activations are rounded, from ../shared/golden/README.md. A last bit more or less can
# turn a rounding around, and what follows then differs by about as much as the rounding itself.
ROUNDED = {"llm-int8": 2.5e-2, "ct-int8": 2.5e-2, "ct-float8": 6e-2}
GOLDEN_FOLDERS = (
    *("base-bf16", "gptqmodel-gptq-sym", "gptqmodel-gptq-asym", "gptqmodel-awq", "bitsandbytes-nf4-dq"),
    *("bitsandbytes-int8", "llmcompressor-W4A16", "llmcompressor-W8A8", "llmcompressor-FP8"),
)
ACT_ORDER = ("method.order=desc_act", "format.act_order=true")
Quantized = Callable[..., Path]


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def serve(folder: Path, prompt: list[int], new_tokens: int, step_tokens: int) -> tuple[Tensor, list[int]]:
    """Logits of every position of prompt and answer but the last, and the answer."""
    engine = start_engine(folder, EngineOptions(device="cpu", dtype="float32", step_tokens=step_tokens))
    rows: list[Tensor] = []
    compute = engine.runner.decoder.logits

    def watched(hidden: Tensor) -> Tensor:
        rows.append(compute(hidden))
        return rows[-1]

    engine.runner.decoder.logits = watched  # type: ignore[method-assign]
    engine.add(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True, prompt_logprobs=0))
    answer = []
    while engine.unfinished:
        answer += [delta.token for delta in engine.step() if delta.token is not None]
    return torch.cat(rows), answer


def reference_logits(folder: Path, prompt: list[int], answer: list[int], activations: str) -> Tensor:
    """Of the same positions: the prompt at once, then token by token, as `serve` computes them."""
    model = load_reference(folder, dtype="float32", activations=activations)
    with torch.no_grad():
        step = model(torch.tensor([prompt]), use_cache=True)
        rows = [step.logits[0]]
        for token in answer[:-1]:
            step = model(torch.tensor([[token]]), past_key_values=step.past_key_values, use_cache=True)
            rows.append(step.logits[0])
    return torch.cat(rows)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).norm(dim=1) / wanted.norm(dim=1)


def assert_greedy(logits: Tensor, answer: list[int], tie: Tensor | float) -> None:
    """Every token of the answer is the best one by the last rows of logits, near ties left aside."""
    best = logits[-len(answer) :].topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > tie
    assert int(clear.sum()) > len(answer) // 2
    assert torch.equal(torch.tensor(answer)[clear], best.indices[clear, 0])


def rounding_tolerance(folder: Path) -> float | None:
    """None where activations are exact."""
    formats = Checkpoint(folder).formats.values()
    return max((ROUNDED[fmt.name] for fmt in formats if fmt.input_rounding), default=None)


def assert_served(folder: Path, prompt: list[int]) -> None:
    tolerance = rounding_tolerance(folder)
    if tolerance is None:
        assert_served_exactly(folder, prompt)
    else:
        assert_served_with_rounded_inputs(folder, prompt, tolerance)


def assert_served_exactly(folder: Path, prompt: list[int]) -> None:
    logits, answer = serve(folder, prompt, NEW_TOKENS, step_tokens=37)
    wanted = reference_logits(folder, prompt, answer, "exact")
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
    assert_greedy(wanted, answer, tie=1e-3)


def assert_served_with_rounded_inputs(folder: Path, prompt: list[int], tolerance: float) -> None:
    """The prompt is one chunk: LLM.int8 looks for outliers in all tokens of a step."""
    logits, answer = serve(folder, prompt, NEW_TOKENS, step_tokens=512)
    wanted = reference_logits(folder, prompt, answer, "served")
    assert relative_error(logits, wanted) < tolerance
    rows, exact = (row_errors(logits, each) for each in (wanted, reference_logits(folder, prompt, answer, "exact")))
    same = rows < 1e-5  # where no rounding was turned around: how often one is, differs between processors
    assert same.any()
    assert float(exact[same].min()) > 1e-3
    assert_greedy(wanted, answer, tie=2 * (logits - wanted)[-NEW_TOKENS:].abs().amax(1))


def golden(test: Callable[[str], None]) -> Callable[[str], None]:
    """For every folder that another tool wrote."""
    skip = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not here")
    return skip(pytest.mark.parametrize("name", GOLDEN_FOLDERS)(test))


@pytest.fixture
def quantized(quantized_tiny: Callable[..., Path], quantized_draft: Callable[..., Path]) -> Quantized:
    """The tiny random model by a recipe; one that needs data takes a small trained model with its tokenizer."""

    def quantize(name: str, *changes: str) -> Path:
        return (quantized_draft if load_recipe(name).needs_data else quantized_tiny)(name, *changes)

    return quantize


# Others of the same method and layout are served in every run.
_LONG = (
    *("auto-w3.5", "awq-w3g128", "awq-w4g128", "awq-w4g32", "best-w4g128", "best-w4g64", "gptq-w2g64", "gptq-w3g64"),
    *("gptq-w4g128", "gptq-w4g32", "gptq-w4g64-asym", "gptq-w8", "nf4-plain", "rtn-w4g128", "rtn-w4g128-ct"),
    *("rtn-w4g64", "rtn-w8"),
    *("tuned-auto-w2.5", "tuned-auto-w3.0"),
    *("tuned-w2g64", "tuned-w3g128", "tuned-w3g64", "tuned-w4g128", "tuned-w4g64"),
)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(one, marks=pytest.mark.long) if one.name in _LONG else one
        for one in list_recipes()
        # test_gguf_engine.py has files of every type, test_arithmetic.py weights that engines round to FP8
        if not one.writes_gguf and one.name != "w4a8"
    ],
    ids=lambda recipe: recipe.name,
)
def test_every_recipe_is_served(recipe: Recipe, quantized: Quantized) -> None:
    assert_served(quantized(recipe.name), prompt_of(80))


def test_scattered_groups_are_served(quantized: Quantized) -> None:
    assert_served(quantized("gptq-w4g64", *ACT_ORDER), prompt_of(80))


def test_outliers_are_served(quantized_draft: Callable[..., Path]) -> None:
    """LLM.int8 with columns above its threshold, which random models lack."""
    assert_served(quantized_draft("llm-int8"), prompt_of(80))


@pytest.mark.parametrize("family", others_long(list(FAMILIES), ("llama", "gemma2", "gpt_oss", "deepseek_v3")))
def test_every_family_is_served_quantized(
    family: str, family_model: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    """Fused layers, biases and norms beside quantized weights."""
    quantkit.quantize(family_model(family), "rtn-w4g32", tmp_path / "out", quality_windows=0)
    assert_served(tmp_path / "out", [token % 112 for token in prompt_of(60)])


@pytest.mark.parametrize("recipe", ["nf4", "llm-int8", "fp8"])
def test_experts_are_served_in_every_kind_of_format(
    recipe: str, family_model: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    """Table, rounded inputs, floats; a dense layer, experts and a shared one."""
    quantkit.quantize(family_model("qwen2_moe"), recipe, tmp_path / "out", quality_windows=0)
    assert_served(tmp_path / "out", [token % 112 for token in prompt_of(60)])


@golden
def test_golden_logits(name: str) -> None:
    """What the tools that wrote these folders compute, in bfloat16 between any two operations. We compute in float32:
    where activations are rounded too, most roundings fall otherwise, and the wider tolerances are the ones to meet."""
    expected = load_file(GOLDEN / name / "expected.safetensors")
    tolerance = rounding_tolerance(GOLDEN / name) or 1e-2
    for ids, logits in zip(expected["input_ids"].tolist(), expected["logits"], strict=True):
        found, _ = serve(GOLDEN / name, ids, 1, step_tokens=512)
        assert relative_error(found, logits) < tolerance


@golden
def test_golden_answers(name: str) -> None:
    assert_served(GOLDEN / name, prompt_of(80))
