"""How far a comparison is: which format, what is being measured, about how long the rest will take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console

if TYPE_CHECKING:
    from quantkit.eval.compare.asked import Asked, Entry
    from quantkit.eval.compare.results import FormatResult

_WORDS = {
    "quantize": "quantizing",
    "size": "weighing",
    "quality": "measuring quality",
    "reference": "measuring quality on transformers",
    "layers": "looking for damage by layer",
    "speed": "timing answers",
}


class ComparisonBar:
    """A bar on stderr; quiet where nobody watches."""

    def __init__(self, asked: Asked, entries: Sequence[Entry]) -> None:
        from quantkit.eval.compare.forecast import Forecast, spoken, steps_of

        forecast = Forecast(steps_of(asked, entries))

        class Left(bars.ProgressColumn):
            max_refresh = 1.0  # seconds

            def render(self, task: bars.Task) -> str:
                return f"about {spoken(forecast.seconds_left)} left"

        console = Console(stderr=True)
        columns = (
            bars.TextColumn("formats"),
            bars.BarColumn(bar_width=20),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            Left(),
            bars.TextColumn("[dim]{task.fields[doing]}"),
        )
        self._forecast = forecast
        self._progress = bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("formats", total=len(entries), doing="")

    def __enter__(self) -> ComparisonBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def part(self, name: str, doing: str) -> None:
        """`doing` is a part of a format's measurement, or that part and the item that it is at: `quality: window 3`."""
        part, _, item = doing.partition(": ")
        self._forecast.begin((name, part))
        words = _WORDS.get(part, part)
        self._progress.update(self._task, doing=f"{name}: {words}{f', {item}' if item else ''}")

    def done(self, found: FormatResult) -> None:
        self._forecast.finish(found.name)
        self._progress.update(self._task, advance=1, doing="")
        if found.error:
            self._progress.console.print(f"{found.name} failed: {found.error}", style="red", highlight=False)
