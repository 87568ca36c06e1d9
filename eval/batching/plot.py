"""The picture of `quantkit bench batching`: who runs when, what the cache holds, how soon the first token comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from quantkit.errors import InputError, StorageError
from quantkit.eval.batching.drive import MixedRun
from quantkit.eval.batching.results import BatchingResult
from quantkit.eval.batching.run import median_ms
from quantkit.eval.report.palette import GRID, MUTED, SERIES
from quantkit.eval.report.sheet import HEADING, SMALL, TEXT, Sheet
from quantkit.eval.report.svg import clean, drawing

KINDS = (".png", ".svg")
_WIDE, _NARROW, _HEIGHT = 580, 240, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 96, 54
_DOTS = 160  # of an inch in a PNG
_POINTS = 400  # of a line: more than anybody sees


def check_plot(file: Path) -> None:
    """Before anything is measured: a name whose kind is known, in a folder that is there."""
    if file.suffix.lower() not in KINDS:
        raise InputError(f"--plot is '{file}', but must end with {' or '.join(KINDS)}")
    if not file.parent.is_dir():
        raise StorageError(f"--plot is '{file}', but there is no folder {file.parent}")


def write_plot(file: Path, device: str, result: BatchingResult) -> None:
    mixed, prefixes = result.found.mixed, result.found.prefixes
    with drawing():
        sheet = Sheet.new(_WIDE + 2 * _NARROW, _HEIGHT)
        started, load = result.started, result.found.plan.load
        title = f"{clean(started.model)} {clean(started.format)} on {clean(device)}"
        sheet.write(8, 20, title, fontsize=HEADING, weight="bold")
        sheet.write(8, 42, f"{len(load.requests)} requests, {clean(load.source, 60)}", fontsize=TEXT, color=MUTED)
        _requests(_panel(sheet, 0, _WIDE, "requests at once, by seconds"), mixed)
        _bars(
            _panel(sheet, _WIDE, _NARROW, "% of taken cache that holds tokens"),
            [run.way.name for run in mixed],
            [run.use.filled_percent for run in mixed],
        )
        _bars(
            _panel(sheet, _WIDE + _NARROW, _NARROW, "first token, ms (p50)"),
            [run.name for run in prefixes],
            [median_ms(run) for run in prefixes],
        )
        try:
            sheet.figure.savefig(file, format=file.suffix[1:].lower(), dpi=_DOTS, metadata=_without_date(file))
        except OSError as error:
            raise StorageError(f"cannot write {file}: {error.strerror}; choose another --plot") from error


def _without_date(file: Path) -> dict[str, None]:
    return {"Date": None} if file.suffix.lower() == ".svg" else {"Software": None}


def _panel(sheet: Sheet, right: float, width: float, title: str) -> Axes:
    part = sheet.part(right, 0)
    part.write(8, _TOP - 22, title, fontsize=SMALL, color=MUTED)
    axes = part.axes(_LEFT, _TOP, width - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM)
    axes.grid(color=GRID, linewidth=0.8, axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=SMALL, pad=5)
    return axes


def _requests(axes: Axes, runs: Sequence[MixedRun]) -> None:
    for run, colour in zip(runs, SERIES, strict=False):
        shown = run.running[:: -(-len(run.running) // _POINTS)]
        label = f"{run.way.name}: {run.tokens_per_second:,.0f} tokens/s"
        axes.plot([at for at, _ in shown], [count for _, count in shown], color=colour, linewidth=1.5, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left", bbox_to_anchor=(-0.1, -0.12), ncol=len(runs))


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float]) -> None:
    bars = axes.bar(names, values, color=SERIES[: len(names)], width=0.6)
    labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    axes.bar_label(bars, labels, fontsize=SMALL, padding=2)
    axes.margins(y=0.12)
