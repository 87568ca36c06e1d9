"""What a watermark brings and costs, measured: cheap on the small model, as it is promised on the bundled one."""

from typing import Any

import pytest

from quantkit import LLM
from quantkit.eval.watermark import count_false_positives, drawn_answers, measure_watermark


def test_the_small_model() -> None:
    llm = LLM("demo-draft", device="cpu", max_context=512, kv_tokens=4096, max_sequences=8)
    found = measure_watermark(llm, answers=8, tokens=100, keys=500, windows=4)
    assert (found.found, found.tokens) == (8, 100)
    assert found.median_z > 5
    assert found.false_positives <= 8 * 500 * 1e-3  # 4,000 tries say no more
    assert 0 < found.kl < 0.6
    assert found.perplexity < found.marked_perplexity < 1.6 * found.perplexity


def test_what_is_marked_would_be_a_false_positive_of_its_key(monkeypatch: Any) -> None:
    """The count of false positives finds watermarks where there are some."""
    from quantkit.eval import watermark

    llm = LLM("demo-draft", device="cpu", max_context=256, kv_tokens=4096, max_sequences=4)
    monkeypatch.setattr(watermark, "_SECRET", "another key 3")
    mark = watermark.Watermark(watermark._SECRET)
    ids = [ids for _, ids in drawn_answers(llm, 4, 100, mark)]
    assert count_false_positives(ids, 3, mark.gamma) == 0
    assert count_false_positives(ids, 4, mark.gamma) == 4


@pytest.mark.long
def test_answers_of_200_tokens_of_the_bundled_model() -> None:
    """At least 99 % are found, and of 2,560,000 pairs of a plain answer and a key at most 1 in 10,000 seems to be
    marked. Bounds are whole numbers, so that fewer are expected."""
    found = measure_watermark(LLM("demo", device="cpu", max_context=512, max_sequences=64), answers=128, keys=20_000)
    assert found.found >= 0.99 * 128
    assert found.false_positives <= 128 * 20_000 * 1e-4
