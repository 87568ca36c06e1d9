"""What the kernels lose: perplexity and KL of the bundled model on a GPU in bfloat16 against its meaning in float32.

The standing answer to "did an optimisation change what a format computes?": for every number of tokens a kernel is
chosen for, on text that the model knows. Plain torch in bfloat16 loses something too, and is the measure, its logits
rounded as an engine's are. With --junitxml=FILE all numbers are kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

import quantkit
from quantkit.bundled import HELDOUT_TEXT
from quantkit.eval.quality.measure import QualityResult, measure_quality
from quantkit.eval.quality.predictors import Arithmetic, Predictor, load_predictor
from quantkit.eval.quality.windows import read_windows
from quantkit.reference import load_tokenizer

pytestmark = pytest.mark.gpu

WINDOW = 256
RECIPES = ("bfloat16", "rtn-w4g128", "rtn-w4g128-asym", "rtn-w4g32", "rtn-w3g128", "rtn-w2g64", "rtn-w8", "nf4",
           "nf4-plain", "fp4", "gptq-w4g128", "awq-w4g128", "llm-int8", "rtn-w8a8", "fp8", "fp8-block",
           "fp8-static")  # fmt: skip


@dataclass(frozen=True)
class Model:
    folder: Path | str
    meaning: Predictor  # float32
    plain: Predictor  # torch in bfloat16


@dataclass(frozen=True)
class HalfLogits:
    """A predictor whose logits are bfloat16, which alone costs this model a KL of 7e-5: engines sample from such."""

    predictor: Predictor

    @property
    def folder(self) -> Path:
        return self.predictor.folder

    @property
    def vocab_size(self) -> int:
        return self.predictor.vocab_size

    def logits(self, ids: Tensor) -> Tensor:
        return self.predictor.logits(ids).bfloat16().float()

    def describe(self) -> Arithmetic:
        return self.predictor.describe()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """`model(recipe)`: the bundled model in this format, made when it is first asked for."""
    made: dict[str, Model] = {}

    def make(recipe: str) -> Model:
        if recipe not in made:
            folder: Path | str = "demo"
            if recipe != "bfloat16":
                folder = tmp_path_factory.mktemp("quality") / recipe
                quantkit.quantize("demo", recipe, folder, device="cuda", quality_windows=0)
            meaning, plain = (
                load_predictor(folder, "reference", window=WINDOW, device="cuda", dtype=dtype)
                for dtype in (None, "bfloat16")
            )
            made[recipe] = Model(folder, meaning, HalfLogits(plain))
        return made[recipe]

    return make


@pytest.mark.parametrize("step_tokens", [1, 8, 16, 32, 64, 128, None], ids=lambda size: f"{size or WINDOW} tokens")
@pytest.mark.parametrize("recipe", [pytest.param(recipe, marks=pytest.mark.xdist_group(recipe)) for recipe in RECIPES])
def test_kernels_lose_no_more_than_torch(
    recipe: str,
    step_tokens: int | None,
    model: Callable[[str], Model],
    record_property: Callable[[str, object], None],
) -> None:
    made = model(recipe)
    count = 1 if step_tokens == 1 else 4
    windows = read_windows(load_tokenizer("demo"), HELDOUT_TEXT, window=WINDOW, max_windows=count)
    runtime = load_predictor(
        made.folder, "runtime", window=WINDOW, device="cuda", dtype="bfloat16", step_tokens=step_tokens
    )
    found = {
        name: loss(measure_quality(predictor, windows, made.meaning))
        for name, predictor in (("torch", made.plain), ("runtime", runtime))
    }
    for name, (kl, log_ratio) in found.items():
        record_property(f"{name}_kl", f"{kl:.6f}")
        record_property(f"{name}_perplexity_ratio", f"{math.exp(log_ratio):.5f}")
    kl, log_ratio = found["runtime"]
    assert 0 <= kl < 1.5 * found["torch"][0]
    # Of a distribution that is off by so much KL, a token's log-probability is off by sqrt(2 KL); tokens differ.
    noise = math.sqrt(2 * kl / (count * (WINDOW - 1)))
    assert abs(log_ratio) < kl + 4 * noise


def loss(found: QualityResult) -> tuple[float, float]:
    """KL, and the logarithm of the perplexity's ratio."""
    assert found.kl is not None
    assert found.perplexity_ratio is not None
    return found.kl.value, math.log(found.perplexity_ratio.value)
