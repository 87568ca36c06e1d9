"""Perplexity against a straightforward second computation, and the ordering of formats that users rely on."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.bundled import CALIBRATION_TEXT, HELDOUT_TEXT
from quantkit.calibration import Calibration
from quantkit.eval.formats_table import compare_formats
from quantkit.eval.perplexity import measure_perplexity
from quantkit.pipeline import quantize
from quantkit.reference import load_reference, load_tokenizer
from quantkit.sources import model_folder


def test_equals_a_plain_transformers_loop() -> None:
    folder = model_folder("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(HELDOUT_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    losses = []
    with torch.no_grad():
        for start in (0, 512, 1024):
            window = ids[start : start + 512][None]
            losses.append(float(model(window, labels=window).loss))
    result = measure_perplexity(
        load_reference("demo", "float32"), load_tokenizer("demo"), HELDOUT_TEXT, window=512, max_windows=3
    )
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)
    assert (result.windows, result.tokens) == (3, 3 * 511)
    assert 2 < result.bytes / result.tokens < 6


def test_formats_order_as_their_bits_do(tmp_path: Path) -> None:
    """8 bits cannot be told from bf16, plain 4 bits measurably lose, 3 bits clearly."""
    recipes = ("llm-int8", "nf4", "rtn-w4g128", "rtn-w3g128")
    table = compare_formats("demo", recipes, tmp_path, window=512, max_windows=40)
    base, int8, nf4, w4, w3 = (row.perplexity for row in table.rows)
    assert int8 == pytest.approx(base, rel=0.003)
    assert base * 1.003 < nf4 < w4 * 1.05
    assert base * 1.005 < w4 < base * 1.15
    assert w3 > base + 3 * (w4 - base)
    assert [round(row.bits_per_weight) for row in table.rows] == [16, 8, 4, 4, 3]


def test_gptq_beats_plain_rounding(tmp_path: Path) -> None:
    """With little data already, on text it never saw: clearly less lost than by rounding."""
    calibration = Calibration(samples=24, seq_len=256)
    tokenizer = load_tokenizer("demo")
    loss = {}
    for recipe in ("gptq-w4g128", "gptq-w3g128", "rtn-w4g128", "rtn-w3g128"):
        quantize("demo", recipe, tmp_path / recipe, calibration=calibration)
        model = load_reference(tmp_path / recipe, "float32")
        loss[recipe] = measure_perplexity(model, tokenizer, HELDOUT_TEXT, window=512, max_windows=24).loss
    base = measure_perplexity(
        load_reference("demo", "float32"), tokenizer, HELDOUT_TEXT, window=512, max_windows=24
    ).loss
    assert loss["gptq-w4g128"] - base < 0.8 * (loss["rtn-w4g128"] - base)
    assert loss["gptq-w3g128"] - base < 0.6 * (loss["rtn-w3g128"] - base)


def test_bundled_texts_do_not_overlap() -> None:
    """Long lines of the calibration text never stand in the held-out text."""
    calibration = {line for line in CALIBRATION_TEXT.read_text(encoding="utf-8").splitlines() if len(line) > 120}
    heldout = {line for line in HELDOUT_TEXT.read_text(encoding="utf-8").splitlines() if len(line) > 120}
    assert len(calibration) > 500
    assert len(heldout) > 500
    assert not calibration & heldout
