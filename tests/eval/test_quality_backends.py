"""Our runtime and the transformers reference measure the same: every recipe, whole windows and small steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.quality.measure import QualityResult, measure_quality
from quantkit.eval.quality.predictors import RuntimePredictor, load_predictor
from quantkit.eval.quality.windows import Windows, read_windows
from quantkit.recipe import Recipe, list_recipes
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

WINDOW = 48
# Where activations are rounded, a last bit more or less can turn a rounding around, and what follows then differs by
# about as much as the rounding itself: 3 binary digits in FP8, 7 in INT8. Elsewhere both compute the same in float32.
KL_LIMIT = {"fp8": 1e-2, "int8": 1e-3}
# The runtime rounds these weights to FP8 once more (docs/explanations/quantization.md, "Inputs in FP8"), which
# tests/runtime/test_arithmetic.py holds to its own reference; here both read the codes in float32.
IN_16_BITS = "w4a8"
# One recipe of each way to store or round that `test_steps_measure_the_same` lacks: 2 bits with zero points, 8 bits,
# AWQ's layout, FP4, FP8 by channel, by block and by tensor with scales from data, INT8, outliers. The others differ in
# the size of groups, or in how the same codes are found; tests/runtime/test_engine_formats.py compares all logits.
KINDS = ("rtn-w2g64", "rtn-w8", "rtn-w4g128-asym", "fp4", "fp8", "fp8-block", "fp8-static", "rtn-w8a8", "llm-int8")


def windows_of(vocabulary: int) -> Windows:
    ids = torch.randint(3, vocabulary, (3, WINDOW), generator=torch.Generator().manual_seed(4))
    return Windows(ids, "random", (200, 200, 200))


def text_windows() -> Windows:
    tokenizer = load_tokenizer(model_folder("demo-draft"))
    return read_windows(tokenizer, HELDOUT_TEXT, window=WINDOW, max_windows=3)


def both(
    folder: Path, windows: Windows, step_tokens: int | None = None, *, arithmetic: str | None = None
) -> tuple[QualityResult, QualityResult]:
    """The runtime's result compared with the reference's as its base, and the reference's own."""
    runtime = load_predictor(folder, "runtime", window=WINDOW, step_tokens=step_tokens, arithmetic=arithmetic)
    assert isinstance(runtime, RuntimePredictor)
    reference = load_predictor(folder, window=WINDOW, activations="served" if arithmetic is None else "exact")
    found = measure_quality(runtime, windows, reference), measure_quality(reference, windows)
    runtime.engine.scheduler.pool.check_integrity([])
    return found


def assert_agree(found: QualityResult, wanted: QualityResult, limit: float) -> None:
    assert wanted.perplexity.low is not None
    assert wanted.perplexity.high is not None
    assert wanted.perplexity.low < found.perplexity.value < wanted.perplexity.high
    assert found.perplexity.value == pytest.approx(wanted.perplexity.value, rel=1e-3 if limit < 1e-4 else 1e-2)
    assert found.kl
    assert abs(found.kl.value) < limit


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=() if recipe.name in KINDS else pytest.mark.long)
        for recipe in list_recipes()
    ],
)
def test_every_recipe_measures_the_same(
    recipe: Recipe, quantized_tiny: Callable[..., Path], quantized_draft: Callable[..., Path]
) -> None:
    """A recipe that needs data takes a small trained model with its tokenizer, and text that it was taught to read:
    of a text at random it is sure, and wrong, so that every rounding counts many times."""
    folder = (quantized_draft if recipe.needs_data else quantized_tiny)(recipe.name)
    windows = text_windows() if recipe.needs_data else windows_of(500)
    if recipe.name == IN_16_BITS:
        found, wanted = both(folder, windows, arithmetic="16-bit")
        rounding = []
    else:
        found, wanted = both(folder, windows)
        rounded = [fmt.input_rounding for fmt in Checkpoint(model_folder(folder)).formats.values()]
        rounding = [KL_LIMIT[how.arithmetic] for how in rounded if how]
    assert_agree(found, wanted, max(rounding, default=1e-6))
    assert (found.backend, wanted.backend) == ("runtime", "reference")


STEPS = {"nf4": 1, "rtn-w4g128": 7, "rtn-w3g128": None}  # the number of tokens that is not long


@pytest.mark.parametrize(
    ("recipe", "step_tokens"),
    [
        pytest.param(recipe, tokens, marks=() if tokens == quick else pytest.mark.long)
        for recipe, quick in STEPS.items()
        for tokens in (1, 7, None)
    ],
)
def test_steps_measure_the_same(recipe: str, step_tokens: int | None, quantized_tiny: Callable[..., Path]) -> None:
    found, wanted = both(quantized_tiny(recipe), windows_of(500), step_tokens)
    assert_agree(found, wanted, 1e-6)
    assert f"step_tokens {step_tokens or WINDOW}," in found.arithmetic


def test_wrong_settings_are_one_line(tiny_model: Path) -> None:
    with pytest.raises(InputError, match="the reference runs whole windows; use backend runtime"):
        load_predictor(tiny_model, window=WINDOW, step_tokens=4)
    with pytest.raises(InputError, match="always rounds activations as it serves them; use backend reference"):
        load_predictor(tiny_model, "runtime", window=WINDOW, activations="exact")
    with pytest.raises(InputError, match="backend"):
        load_predictor(tiny_model, "vllm")
    for backend in ("reference", "runtime"):
        with pytest.raises(InputError, match="a window of 999 tokens does not fit the model; choose 2 to 256"):
            load_predictor(tiny_model, backend, window=999)
