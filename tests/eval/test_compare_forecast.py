"""What a comparison says of the time that is left."""

import io

import pytest
from rich.console import Console

from quantkit.bundled import HELDOUT_TEXT
from quantkit.cli import comparison_bar
from quantkit.eval.compare.asked import Asked, Entry
from quantkit.eval.compare.forecast import START, USUAL, Forecast, spoken, steps_of
from quantkit.eval.compare.parts import parts_of
from quantkit.eval.compare.results import FormatResult

ENTRIES = [Entry("bfloat16", "baseline", "demo"), Entry("nf4", "recipe", "nf4"), Entry("w4", "recipe", "rtn-w4g128")]
ASKED = Asked("demo", str(HELDOUT_TEXT), 2, 64, None, None, None, (1,), 8, 3, "cpu", reference=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, forecast: Forecast, name: str, slowness: float) -> None:
    for step in [step for step in steps_of(ASKED, ENTRIES) if step[0] == name]:
        forecast.begin(step)
        clock.now += slowness * USUAL[step[1]]
    forecast.finish(name)


def test_every_part_has_a_usual_time() -> None:
    known = {part.name for entry in ENTRIES for part in parts_of(ASKED, entry)} | {START}
    assert known == set(USUAL)


def test_before_anything_is_known_parts_take_what_they_usually_do() -> None:
    forecast = Forecast(steps_of(ASKED, ENTRIES), Clock())
    assert forecast.seconds_left == pytest.approx(sum(USUAL[part] for _, part in steps_of(ASKED, ENTRIES)))


@pytest.mark.parametrize("slowness", [0.1, 1.0, 5.0])
def test_what_was_seen_decides_about_the_rest(slowness: float) -> None:
    clock = Clock()
    forecast = Forecast(steps_of(ASKED, ENTRIES), clock)
    usual = sum(USUAL[part] for name, part in steps_of(ASKED, ENTRIES) if name == "w4")
    run(clock, forecast, "bfloat16", slowness)
    early = forecast.seconds_left / (2 * usual)
    run(clock, forecast, "nf4", slowness)
    late = forecast.seconds_left / usual
    far = [abs(pace - slowness) for pace in (late, early, 1.0)]
    assert far == pytest.approx(sorted(far), abs=1e-9), "every format brings it nearer"
    assert late == pytest.approx(slowness, rel=1.5)
    run(clock, forecast, "w4", slowness)
    assert forecast.seconds_left == 0.0


def test_time_passes_within_a_part_but_the_rest_stays() -> None:
    clock = Clock()
    forecast = Forecast([("a", "quantize"), ("a", "speed")], clock)
    forecast.begin(("a", "quantize"))
    forecast.begin(("a", "quantize"))  # told again with every layer
    clock.now += 5
    assert forecast.seconds_left == pytest.approx(USUAL["quantize"] - 5 + USUAL["speed"])
    clock.now += 1000
    assert forecast.seconds_left == pytest.approx(USUAL["speed"])


def test_formats_that_were_measured_before_say_nothing_about_the_pace() -> None:
    clock = Clock()
    forecast = Forecast(steps_of(ASKED, ENTRIES), clock)
    forecast.finish("bfloat16")
    forecast.finish("nf4")
    assert forecast.seconds_left == pytest.approx(sum(USUAL[part] for name, part in steps_of(ASKED, ENTRIES[2:])))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "5 s"), (7.6, "10 s"), (54, "55 s"), (56, "1 min"), (89, "1 min"), (100, "2 min")]
)
def test_spoken(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


def test_the_bar_says_what_happens_and_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=140, color_system=None)
    monkeypatch.setattr(comparison_bar, "Console", lambda stderr: terminal)
    with comparison_bar.ComparisonBar(ASKED, ENTRIES) as bar:
        bar.part("nf4", "quality: window 1")
        bar._progress.refresh()
        bar.done(FormatResult("nf4", "", error="it broke"))
    shown = screen.getvalue()
    assert "nf4: measuring quality, window 1" in shown
    assert "about 2 min left" in shown
    assert "nf4 failed: it broke" in shown
