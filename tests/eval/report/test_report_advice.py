"""The advice of a report: by the rows of that comparison, on the page and in its numbers."""

import json
from collections.abc import Callable
from pathlib import Path

from quantkit.eval.advice.from_rows import speed_of
from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.rules import choose
from quantkit.eval.report.verdict import judge


def test_every_goal_is_answered_by_rows_of_the_comparison(full: Comparison) -> None:
    advice = {one.goal: one for one in judge(full).advice}
    assert set(advice) == {"latency", "throughput", "memory", "quality"}
    able = [found for found in full.formats if found.name in choose(full).acceptable]
    sizes = {found.name: found.size.bytes for found in able if found.size}
    assert advice["memory"].format == min(sizes, key=lambda name: sizes[name])
    rates = {found.name: speed.tokens_per_second for found in able if (speed := speed_of(found, "throughput"))}
    assert rates[advice["throughput"].format] >= 0.95 * max(rates.values())
    for one in advice.values():
        assert one.format in {found.name for found in able}
        assert one.reasons[0].source.startswith(f"this comparison: {one.format}")
        assert full.date in one.reasons[0].source


def test_it_is_on_the_page_in_the_text_and_in_the_numbers(written: Callable[[str], Path]) -> None:
    folder = written("full")
    numbers = json.loads((folder / "report.json").read_text(encoding="utf-8"))["verdict"]["advice"]
    assert len(numbers) == 4
    page, text = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    for one in numbers:
        assert f"{one['goal']}: {one['format']}" in page
        assert f"For {one['goal']}: {one['format']}" in text.replace("\\", "")


def test_nothing_measured_gives_no_advice(variants: Callable[[str], Comparison]) -> None:
    from dataclasses import replace

    assert judge(replace(variants("full"), formats=())).advice == ()
