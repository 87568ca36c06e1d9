"""Two formats of one model, told apart by what differs in each window."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.bundled import HELDOUT_TEXT
from quantkit.eval.quality.measure import QualityResult, measure_quality
from quantkit.eval.quality.paired import kl_difference, perplexity_quotient
from quantkit.eval.quality.predictors import load_predictor
from quantkit.eval.quality.windows import read_windows
from quantkit.reference import load_tokenizer

WINDOW = 128


@pytest.fixture(scope="module")
def pair(quantized_draft: Callable[..., Path]) -> tuple[QualityResult, QualityResult]:
    """NF4 with its scales rounded too, and NF4 with exact ones: nearly the same damage, in the same places."""
    windows = read_windows(load_tokenizer("demo-draft"), HELDOUT_TEXT, window=WINDOW, max_windows=8)
    base = load_predictor("demo-draft", window=WINDOW)
    folders = quantized_draft("nf4"), quantized_draft("nf4", "format.double_quant=false")
    first, second = (measure_quality(load_predictor(folder, window=WINDOW), windows, base) for folder in folders)
    return first, second


def test_what_rounding_scales_costs_is_clear_where_intervals_overlap(
    pair: tuple[QualityResult, QualityResult],
) -> None:
    double, plain = pair
    assert double.kl is not None
    assert plain.kl is not None
    assert double.kl.overlaps(plain.kl)
    found = kl_difference(double, plain)
    assert found is not None
    assert found.value == pytest.approx(double.kl.value - plain.kl.value)
    assert found.low is not None
    assert found.low > 0
    quotient = perplexity_quotient(double, plain)
    assert quotient is not None
    assert quotient.value == pytest.approx(double.perplexity.value / plain.perplexity.value)


def test_numbers_by_window_are_the_mean(pair: tuple[QualityResult, QualityResult]) -> None:
    found = pair[0]
    assert found.window_kl is not None
    assert found.window_losses is not None
    assert found.kl is not None
    assert sum(found.window_kl) / 8 == pytest.approx(found.kl.value)
    assert len(found.window_losses) == 8


def test_old_results_load_and_cannot_be_paired(pair: tuple[QualityResult, QualityResult]) -> None:
    stored = json.loads(json.dumps(pair[0].to_dict()))
    del stored["window_kl"], stored["window_losses"]
    old = QualityResult.from_dict(stored)
    assert old == replace(pair[0], window_kl=None, window_losses=None)
    assert kl_difference(old, pair[1]) is None
    assert perplexity_quotient(pair[1], old) is None
    assert QualityResult.from_dict(json.loads(json.dumps(pair[1].to_dict()))) == pair[1]


def test_other_windows_cannot_be_paired(pair: tuple[QualityResult, QualityResult]) -> None:
    assert kl_difference(pair[0], replace(pair[1], protocol="another text")) is None
    assert kl_difference(pair[0], replace(pair[1], window_kl=(0.1,) * 7)) is None
