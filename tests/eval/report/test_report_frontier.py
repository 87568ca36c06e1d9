"""The frontier of size against loss: who is on it, and that report, numbers and chart say the same."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.frontier import frontier, unbeaten

Comparing = Callable[..., Comparison]
Variants = Callable[[str], Comparison]
Written = Callable[[str], Path]


def test_a_point_is_kept_unless_another_costs_no_more_and_one_cost_is_less() -> None:
    points = [(1.0, 9.0), (3.0, 5.0), (3.0, 5.0), (3.0, 6.0), (4.0, 5.0), (8.0, 0.0), (9.0, 9.0)]
    assert unbeaten(points) == [True, True, True, False, False, True, False]


def test_one_point_is_its_own_frontier_and_none_has_none() -> None:
    assert unbeaten([(1.0, 1.0)]) == [True]
    assert unbeaten([]) == []


def test_equal_sizes_and_equal_losses(comparing: Comparing) -> None:
    found = comparing(
        base={"size": 400, "ratio": 1.0, "kl": 0.0},
        twin_a={"size": 100, "ratio": 1.1, "kl": 0.1},
        twin_b={"size": 100, "ratio": 1.1, "kl": 0.1},
        as_small={"size": 100, "ratio": 1.1, "kl": 0.2},
        as_close={"size": 110, "ratio": 1.1, "kl": 0.1},
        smallest={"size": 90, "ratio": 9.0, "kl": 3.0},
    )
    assert frontier(found) == ("base", "twin-a", "twin-b", "smallest")


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_formats_that_cannot_be_weighed_neither_stand_there_nor_beat_others(comparing: Comparing, kl: float) -> None:
    found = comparing(
        base={"size": 400, "ratio": 1.0, "kl": 0.0},
        unmeasured={"size": 10},
        broken={"size": 10, "ratio": 1.0, "kl": kl},
        failed={"size": 10, "ratio": 1.0, "kl": 0.0, "error": "out of memory"},
        crashed=None,
        good={"size": 100, "ratio": 1.1, "kl": 0.1},
    )
    assert frontier(found) == ("base", "good")


def test_one_format_has_no_frontier(comparing: Comparing) -> None:
    assert frontier(comparing(base={"size": 400, "ratio": 1.0, "kl": 0.0})) == ()
    assert frontier(comparing()) == ()


def test_rounding_in_another_order_is_no_loss(comparing: Comparing) -> None:
    """The unquantized model against itself differs by 1e-9 nats, or not at all."""
    found = comparing(base={"size": 400, "ratio": 1.0, "kl": 3e-9}, lossless={"size": 200, "ratio": 1.0, "kl": 5e-9})
    assert frontier(found) == ("lossless",)


def test_the_chart_joins_it(full: Comparison) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    from quantkit.eval.report.tradeoff import memory_panel

    panel = memory_panel(full)
    assert panel is not None
    assert {dot.name for dot in panel.front()} == set(frontier(full))
    assert "fp8" not in frontier(full)  # it failed


def test_page_and_numbers_name_it(written: Written, variants: Variants) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    folder = written("cpu-few")
    stored = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = {one["name"]: one["frontier"] for one in stored["formats"]}
    assert found == {"bfloat16": True, "nf4": True, "fp8": False}
    assert Comparison.from_dict(stored) == variants("cpu-few")
    for page in ("report.html", "report.md"):
        shown = (folder / page).read_text(encoding="utf-8")
        assert "no other format is both smaller and closer: bfloat16, nf4." in shown


def test_the_terminal_marks_it(comparing: Comparing, capsys: pytest.CaptureFixture[str]) -> None:
    from quantkit.cli.compare import print_comparison

    found = comparing(
        base={"size": 400, "ratio": 1.0, "kl": 0.0},
        good={"size": 100, "ratio": 1.1, "kl": 0.1},
        beaten={"size": 120, "ratio": 1.2, "kl": 0.2},
    )
    print_comparison(found, Path("report.html"))
    shown = capsys.readouterr().out
    assert "│ good *" in shown
    assert "│ beaten *" not in shown
    assert "*: on the frontier" in shown
    print_comparison(comparing(base={"size": 400}), Path("report.html"))
    assert "*" not in capsys.readouterr().out
