"""The verdict: which format for which need, and what the two sentences say about it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.rules import BEST, FASTEST, NEEDS, SMALLEST
from quantkit.eval.report.verdict import judge

BASE = {"size": 400, "ratio": 1.0, "kl": 0.0, "rate": 100.0}
INT8 = {"size": 200, "ratio": 1.002, "kl": 0.001, "rate": 120.0}
INT4 = {"size": 110, "ratio": 1.03, "kl": 0.03, "rate": 180.0}
WORSE = INT4 | {"size": 111, "rate": 1.0}
BAD = {"size": 60, "ratio": 9.0, "kl": 2.0, "rate": 300.0}

# Windows that are hard for one format are hard for the other.
HARD = tuple(0.03 + 0.02 * math.sin(1.7 * window) for window in range(16))
MIXED = tuple(kl + 0.004 * (-1) ** window + 0.0001 for window, kl in enumerate(HARD))
WIDE = {"kl": (0.030, 0.025, 0.035), "window_kl": HARD}


def shifted(more: float) -> tuple[float, ...]:
    """The same luck, and a little worse in every window."""
    return tuple(kl + more for kl in HARD)


# formats; smallest, fastest, best quality; what the sentences must say
CASES: dict[str, tuple[dict[str, Any], tuple[str | None, str | None, str | None], list[str]]] = {
    "one format for each need": (
        {"base": BASE, "int8": INT8, "int4": INT4, "bad": BAD},
        ("int4", "int4", "int8"),
        ["For the best quality take int8 (KL divergence 0.00100, perplexity +0.20 %), and for the smallest model",
         "and the fastest answers at batch 1 take int4 (110 B, 28 % of base; 180 tokens/s, 1.80",
         "at most 5 % more perplexity than base and at most 0.05 nats of KL divergence, with the upper ends",
         "which bad misses"],
    ),
    "the unquantized model is the fastest": (
        {"base": BASE | {"rate": 500.0}, "int4": INT4},
        ("int4", "base", "int4"),
        ["for the fastest answers at batch 1 keep the unquantized base (500 tokens/s)", "which all of them keep"],
    ),
    "speeds closer than the rule are a tie": (
        {"base": BASE, "int4": INT4, "nf4": INT4 | {"rate": 176.0, "size": 120, "kl": 0.05}},
        ("int4", "int4", "int4"),
        ["in speed nf4 cannot be told apart from int4 here"],
    ),
    "overlapping intervals of windows that differ all alike are no tie": (
        {"base": BASE, "one": INT4 | WIDE, "two": WORSE | {"kl": (0.032, 0.027, 0.037), "window_kl": shifted(0.002)}},
        ("one", "one", "one"),
        [],
    ),
    "windows that differ this way and that are a tie": (
        {"base": BASE, "one": INT4 | WIDE, "two": WORSE | WIDE | {"kl": (0.0301, 0.025, 0.035), "window_kl": MIXED}},
        ("one", "one", "one"),
        ["in quality two cannot be told apart from one here"],
    ),
    "intervals and windows both say that two differ": (
        {"base": BASE, "one": INT4 | WIDE,
         "two": WORSE | {"kl": (0.045, 0.040, 0.049), "window_kl": shifted(0.015)}},
        ("one", "one", "one"),
        [],
    ),
    "stored without windows, overlapping intervals are a tie": (
        {"base": BASE, "one": INT4 | {"kl": (0.030, 0.025, 0.035)}, "two": WORSE | {"kl": (0.032, 0.027, 0.037)}},
        ("one", "one", "one"),
        ["in quality two cannot be told apart from one here",
         "the stored results of one and two have no numbers by window, so ties in quality are guessed"],
    ),
    "one of two stored without windows": (
        {"base": BASE, "one": INT4 | WIDE, "two": WORSE | {"kl": (0.032, 0.027, 0.037)}},
        ("one", "one", "one"),
        ["in quality two cannot be told apart from one here", "the stored result of two has no numbers by window"],
    ),
    "the closest of those that miss, with its ties": (
        {"base": BASE, "one": BAD | WIDE, "two": BAD | WIDE | {"window_kl": MIXED, "kl": (0.0301, 0.025, 0.035)}},
        (None, "base", None),
        ["and one and two are the closest"],
    ),
    "nothing is acceptable": (
        {"base": BASE, "bad": BAD},
        (None, "base", None),
        ["No quantized format of HuggingFaceTB/SmolLM2-135M can be recommended: keep base.",
         "No quantized format is acceptable here", "bad is the closest"],
    ),
    "the limits themselves are acceptable": (
        {"base": BASE, "int4": INT4 | {"ratio": (1.04, 1.03, 1.05), "kl": (0.04, 0.03, 0.05)}},
        ("int4", "int4", "int4"),
        [],
    ),
    "a good mean whose interval is wide": (
        {"base": BASE, "int8": INT8, "int4": INT4 | {"ratio": (1.01, 0.96, 1.06)}},
        ("int8", "int8", "int8"),
        ["which int4 misses", "for int4 only the interval reaches across a limit, so more windows may decide"],
    ),
    "a good KL divergence whose interval is wide": (
        {"base": BASE, "int8": INT8, "int4": INT4 | {"kl": (0.04, 0.02, 0.06)}},
        ("int8", "int8", "int8"),
        ["which int4 misses", "for int4 only the interval reaches across a limit"],
    ),
    "a good perplexity by luck: its predictions are far away": (
        {"base": BASE, "int8": INT8, "int4": INT4 | {"ratio": (0.99, 0.98, 1.0), "kl": (0.2, 0.19, 0.21)}},
        ("int8", "int8", "int8"),
        ["which int4 misses"],
    ),
    "an interval that reaches down to the limit is no excuse": (
        {"base": BASE, "int8": INT8, "int4": INT4 | {"ratio": (1.06, 1.04, 1.08)}},
        ("int8", "int8", "int8"),
        ["which int4 misses"],
    ),
    "what saves little is not named for quality": (
        {"base": BASE, "int8": INT8 | {"size": 301}, "int4": INT4},
        ("int4", "int4", "int4"),
        [],
    ),
    "nothing saves enough": (
        {"base": BASE, "int8": INT8 | {"size": 301}},
        ("int8", "int8", None),
        ["no acceptable format is known to save 25 % of the bytes"],
    ),
    "a format that failed is never named": (
        {"base": BASE, "int8": INT8, "int4": INT4 | {"error": "out of memory"}},
        ("int8", "int8", "int8"),
        ["int4 failed, the reason stands in the table"],
    ),
    "without quality only size and speed": (
        {"base": {"size": 400, "rate": 100.0}, "int4": {"size": 110, "rate": 180.0}, "bad": {"size": 60, "rate": 90.0}},
        ("bad", "int4", None),
        ["Quality was not measured, so only size and speed are judged"],
    ),
    "a format whose quality is missing": (
        {"base": BASE, "int8": INT8, "int4": {"size": 110, "rate": 180.0}},
        ("int8", "int8", "int8"),
        ["the quality of int4 was not measured"],
    ),
    "without speeds": (
        {"base": BASE | {"rate": None}, "int4": INT4 | {"rate": None}},
        ("int4", None, "int4"),
        ["speed was not measured", "For the best quality and the smallest model take int4"],
    ),
    "the smallest batch that was measured": (
        {"base": BASE | {"batch": 4}, "int4": INT4 | {"batch": 4}},
        ("int4", "int4", "int4"),
        ["the fastest answers at batch 4"],
    ),
    "equal bytes": (
        {"base": BASE, "one": INT4, "two": INT4 | {"kl": 0.04, "rate": 1.0}},
        ("one", "one", "one"),
        ["in size two cannot be told apart from one here"],
    ),
    "only the unquantized model": (
        {"base": BASE},
        (None, "base", None),
        ["Only base", "No quantized format was measured"],
    ),
    "everything failed": ({"base": None, "int4": None}, (None, None, None), ["every format failed", "it broke"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_picks_follow_the_rules_and_the_sentences_say_so(case: str, comparing: Callable[..., Comparison]) -> None:
    formats, expected, said = CASES[case]
    comparison = comparing(**formats)
    verdict = judge(comparison)
    assert tuple(verdict.pick(need).format for need in (SMALLEST, FASTEST, BEST)) == expected
    sentences = " ".join(verdict.sentences)
    for words in said:
        assert words in sentences
    assert ("only the interval reaches" in sentences) == any("only the interval" in words for words in said)
    assert ("cannot be told apart" in sentences) == any("told apart" in words for words in said)


def test_one_window_is_no_ground_for_an_order(comparing: Callable[..., Comparison]) -> None:
    many = comparing(base=BASE, one=INT4 | {"window_kl": (0.03,)}, two=WORSE | {"kl": 0.04, "window_kl": (0.04,)})
    single = replace(many, formats=tuple(
        replace(found, quality=replace(found.quality, windows=1, compared_windows=1))
        for found in many.formats if found.quality is not None
    ))  # fmt: skip
    words = "one window cannot say how sure the order in quality is"
    assert [words in judge(comparison).sentences[1] for comparison in (many, single)] == [False, True]


def test_order_of_needs() -> None:
    assert NEEDS == (BEST, SMALLEST, FASTEST) == ("best quality", "smallest", "fastest")


def test_a_cpu_says_that_its_speeds_are_a_cpus(comparing: Callable[..., Comparison]) -> None:
    words = "speeds are this CPU's and say nothing about a GPU"
    for gpu in (True, False):
        comparison = comparing(gpu=gpu, base=BASE, int4=INT4)
        assert (words in judge(comparison).sentences[1]) is not gpu


@pytest.mark.parametrize(("rate", "named"), [(90.0, False), (104.0, False), (106.0, True)])
def test_a_cpu_names_a_format_for_speed_only_where_it_gains(
    rate: float, named: bool, comparing: Callable[..., Comparison]
) -> None:
    """A tie with the unquantized model is no gain. A GPU names the fastest in any case."""
    formats = {"base": BASE, "int4": INT4 | {"rate": rate}}
    verdict = judge(comparing(gpu=False, **formats))
    assert verdict.pick(FASTEST).format == ("int4" if named else None)
    words = "on this CPU no acceptable format is clearly faster than base, which says nothing about a GPU"
    assert (words in " ".join(verdict.sentences)) is not named
    assert ("fastest answers" in verdict.sentences[0]) is named
    assert judge(comparing(gpu=True, **formats)).pick(FASTEST).format == ("int4" if rate > 100 else "base")


@pytest.mark.parametrize("name", ["full", "cpu", "shape", "single", "no-speeds", "failed", "empty", "hostile"])
def test_always_two_sentences(name: str, variants: Callable[[str], Comparison]) -> None:
    comparison = variants(name)
    first, second = judge(comparison).sentences
    for sentence in (first, second):
        assert sentence[0] == sentence[0].upper()
        assert sentence.endswith(".")
        assert not sentence.endswith("..")
        assert "None" not in sentence


def test_of_the_whole_fixture(full: Comparison) -> None:
    verdict = judge(full)
    assert [pick.format for pick in verdict.picks] == ["llm-int8", "gptq-w4g128", "gptq-w4g128"]
    assert verdict.pick(FASTEST).ties == ("awq-w4g128",)
    assert verdict.unacceptable == ("nf4", "gptq-w3g128", "rtn-w2g64")
    assert verdict.failed == ("fp8",)
    assert verdict.borderline == ()
