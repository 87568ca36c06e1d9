"""What calibration is for where a model has experts, on the bundled one; and what it still does for experts that a text
hardly reaches."""

from collections.abc import Callable
from pathlib import Path

import pytest

import quantkit
from quantkit.calibration import Calibration
from quantkit.methods.statistics import InputStatistics
from quantkit.passes import experts
from quantkit.pipeline.quality import Quality
from quantkit.pipeline.report import QuantizeReport
from quantkit.recipe import load_recipe

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("experts quality")]  # the runs are shared between the tests

MODEL = "demo-experts"
FEW = Calibration(samples=16, seq_len=256)
Run = Callable[..., tuple[QuantizeReport, Quality]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(recipe, *changes, calibration=...)`: what was reported, and perplexity and divergence on held-out text."""
    folder = tmp_path_factory.mktemp("experts")
    known: dict[tuple[object, ...], QuantizeReport] = {}

    def quantize(
        recipe: str, *changes: str, calibration: Calibration = FEW, again: bool = False
    ) -> tuple[QuantizeReport, Quality]:
        key = (recipe, changes, calibration)
        if again or key not in known:
            output = folder / str(len(known))
            known[key] = quantkit.quantize(
                MODEL, load_recipe(recipe, changes), output, calibration=calibration, quality_windows=4, overwrite=True
            )
        found = known[key]
        assert found.quality is not None
        return found, found.quality

    return quantize


@pytest.mark.parametrize(("recipe", "same_format"), [("gptq-w4g64", ()), ("awq-w4g64", ("format.sym=false",))])
def test_calibration_beats_plain_rounding(recipe: str, same_format: tuple[str, ...], run: Run) -> None:
    (report, calibrated), (_, plain) = run(recipe), run("rtn-w4g64", *same_format)
    assert report.warnings == []
    assert calibrated.kl < 0.75 * plain.kl
    assert calibrated.perplexity < plain.perplexity


def test_a_text_that_starves_experts(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said; and what the block reads beside them is better than what they saw alone, or plain rounding."""
    text = tmp_path / "sums.txt"
    text.write_text("\n".join(f"{n} x {m} = {n * m}" for n in range(100, 400) for m in range(3, 60)))
    sums = Calibration(str(text), samples=16, seq_len=256)
    alone = "method.target=layer"  # what experts lose, attention behind them does not make up for
    report, quality = run("gptq-w3g64", alone, calibration=sums)
    assert report.experts is not None
    assert 10 < len(report.experts.starved) < 40
    (warning,) = report.warnings
    assert "experts were reached by too few calibration tokens" in warning
    monkeypatch.setattr(InputStatistics, "lean_on", lambda *_: None)
    monkeypatch.setattr(experts, "ENOUGH", 0.0)
    without, worse = run("gptq-w3g64", alone, calibration=sums, again=True)
    assert sum("plainly rounded" in one for one in without.warnings) > 10
    assert quality.kl < 0.9 * worse.kl
    assert quality.perplexity < worse.perplexity
