"""What calibration is for: on the bundled models every method must beat plain rounding by a clear margin.

`make test` shows it on the small one; the large one, and what only it can show, are long tests.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibration import Calibration
from quantkit.pipeline.quality import Quality
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

pytestmark = pytest.mark.xdist_group("calibrated quality")  # the runs are shared between the tests

FEW = Calibration(samples=16, seq_len=256)
FEW_POINTS, THREE_STRENGTHS = "method.points=4", "method.points=2"  # of the scale searches
Measure = Callable[..., Quality]
both_models = pytest.mark.parametrize("model", ["demo-draft", pytest.param("demo", marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """`measure(recipe, *changes, model=...)`: perplexity and divergence on held-out text, measured once."""
    folder = tmp_path_factory.mktemp("quality")
    known: dict[tuple[object, ...], Quality] = {}

    def run(recipe: str, *changes: str, model: str | Path) -> Quality:
        key = (recipe, changes, model)
        if key not in known:
            output = folder / str(len(known))
            loaded = load_recipe(recipe, changes)
            report = quantkit.quantize(model, loaded, output, calibration=FEW, quality_windows=2)
            shutil.rmtree(output)
            assert report.quality is not None
            known[key] = report.quality
        return known[key]

    return run


@pytest.fixture(scope="module")
def outlier_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with activation outliers, as large models have them: it computes what it computed before.

    Four outputs of every norm are 32 times as large, and the columns that read them as much smaller.
    """
    folder = Path(shutil.copytree(model_folder("demo"), tmp_path_factory.mktemp("models") / "outliers"))
    tensors = load_file(folder / "model.safetensors")
    columns = [7, 100, 255, 400]
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        block, norm = name.removesuffix(".weight").rsplit(".", 1)
        tensors[name][columns] *= 32
        for reader in readers[norm]:
            tensors[f"{block}.{reader}.weight"][:, columns] /= 32
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lost(quality: Quality) -> float:
    """Perplexity lost, as a share of the original's."""
    return quality.perplexity / quality.base_perplexity - 1


@both_models
def test_gptq_halves_what_plain_rounding_costs_at_3_bits(measure: Measure, model: str) -> None:
    plain, gptq = measure("rtn-w3g128", model=model), measure("gptq-w3g128", model=model)
    assert gptq.kl < 0.5 * plain.kl
    assert lost(gptq) < 0.5 * lost(plain)


@both_models
def test_awq_halves_what_plain_rounding_costs_at_3_bits(measure: Measure, model: str) -> None:
    """Zero points alone gain a part of that; against plain rounding in the same format a third is left to gain."""
    awq = measure("awq-w3g128", FEW_POINTS, model=model)
    plain, same_format = measure("rtn-w3g128", model=model), measure("rtn-w3g128", "format.sym=false", model=model)
    assert awq.kl < 0.5 * plain.kl
    assert awq.kl < 0.7 * same_format.kl
    assert lost(awq) < 0.8 * lost(same_format) < lost(plain)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "changes", "same_format"),
    [("gptq-w4g128", (), "rtn-w4g128"), ("awq-w4g128", (FEW_POINTS,), "rtn-w4g128-asym")],
)
def test_calibration_beats_plain_rounding_at_4_bits(
    measure: Measure, recipe: str, changes: tuple[str, ...], same_format: str
) -> None:
    calibrated, plain = measure(recipe, *changes, model="demo"), measure(same_format, model="demo")
    assert calibrated.kl < 0.85 * plain.kl
    assert lost(calibrated) < 0.85 * lost(plain)


@pytest.mark.parametrize(
    ("model", "share", "divergence"),
    [("demo-draft", 0.005, 0.01), pytest.param("demo", 0.003, 0.005, marks=pytest.mark.long)],
)
def test_llm_int8_costs_next_to_nothing(measure: Measure, model: str, share: float, divergence: float) -> None:
    """A smaller model has less to spare: 3 bits cost it a hundred times its perplexity, the larger one a fraction."""
    quality = measure("llm-int8", model=model)
    assert abs(lost(quality)) < share
    assert quality.kl < divergence


@pytest.mark.long
def test_smoothquant_takes_outliers_out_of_the_activations(measure: Measure, outlier_model: Path) -> None:
    smooth, plain = (
        measure("smoothquant-w8a8", THREE_STRENGTHS, model=outlier_model),
        measure("rtn-w8a8", model=outlier_model),
    )
    assert smooth.kl < 0.5 * plain.kl
    assert lost(smooth) < 0.5 * lost(plain)


@pytest.mark.long
def test_smoothquant_does_no_harm_where_there_are_no_outliers(measure: Measure) -> None:
    smooth, plain = measure("smoothquant-w8a8", THREE_STRENGTHS, model="demo"), measure("rtn-w8a8", model="demo")
    assert smooth.kl < 1.2 * plain.kl
    assert lost(smooth) < lost(plain) + 0.001


@both_models
def test_all_are_measured_against_the_same_original(measure: Measure, model: str) -> None:
    """Beside a format of its own, those that the tests above measured."""
    found = [measure(name, model=model) for name in ("rtn-w3g128", "gptq-w3g128", "rtn-w4g128")]
    assert len({quality.base_perplexity for quality in found}) == 1
    assert 5 < found[0].base_perplexity < 30
    assert (found[0].windows, found[0].window) == (2, 1024)
