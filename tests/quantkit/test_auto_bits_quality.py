"""Automatic bits on the bundled model: better than any share of its layers at 3 bits and the others at 4."""

from pathlib import Path

import pytest

import quantkit
from quantkit.calibration import Calibration
from quantkit.pipeline.report import QuantizeReport
from quantkit.recipe import load_recipe


def quantized(output: Path, recipe: str, *changes: str) -> QuantizeReport:
    calibration = Calibration(samples=16, seq_len=128)
    return quantkit.quantize("demo", load_recipe(recipe, changes), output, calibration=calibration, quality_windows=2)


@pytest.mark.long
def test_three_and_a_half_bits_beat_the_line_between_three_and_four(tmp_path: Path) -> None:
    """Mixing at random gives the straight line: losses of single layers add up. Groups of 128 make the better line."""
    auto = quantized(tmp_path / "auto", "auto-w3.5")
    uniform = ("rtn-w4g128-ct", "method=gptq")
    three, four = (quantized(tmp_path / str(bits), *uniform, f"format.bits={bits}") for bits in (3, 4))
    assert three.bits_per_weight < auto.bits_per_weight <= 3.5 < four.bits_per_weight
    share = (auto.bits_per_weight - three.bits_per_weight) / (four.bits_per_weight - three.bits_per_weight)
    assert auto.quality
    assert three.quality
    assert four.quality
    on_the_line = three.quality.kl + share * (four.quality.kl - three.quality.kl)
    assert auto.quality.kl < 0.9 * on_the_line  # measured 0.80
    line = three.quality.perplexity + share * (four.quality.perplexity - three.quality.perplexity)
    assert auto.quality.perplexity < line
