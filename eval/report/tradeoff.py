"""What is lost against what is gained: quality against speed at several batches, and against bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.report import numbers
from quantkit.eval.report.frontier import weighed
from quantkit.eval.report.palette import BASELINE_LOOK, Look, look
from quantkit.eval.report.rules import divergence_of, speed_at
from quantkit.eval.report.scales import LossScale, SizeScale, bytes_tick
from quantkit.eval.report.scatter import Dot, Panel
from quantkit.wording import human_bytes

MOST_PANELS = 4
LOSS_LABEL = "loss: KL divergence, log scale"


def looks(comparison: Comparison) -> dict[str, Look]:
    """The same colour and mark for a format in every chart."""
    quantized = [found.name for found in comparison.formats if not found.baseline]
    found = {name: look(place) for place, name in enumerate(quantized)}
    return found | {one.name: BASELINE_LOOK for one in comparison.formats if one.baseline}


def batches(comparison: Comparison) -> list[int]:
    """All that were measured; of many the first, the last and some between."""
    found = sorted({speed.batch for one in comparison.formats if one.running for speed in one.running.speeds})
    if len(found) <= MOST_PANELS:
        return found
    last = len(found) - 1
    return [found[round(place * last / (MOST_PANELS - 1))] for place in range(MOST_PANELS)]


def speed_panels(comparison: Comparison) -> list[Panel]:
    """One for each batch; quality against speed, or bytes against speed where no quality was measured."""
    losses = _with_loss(comparison.formats)
    panels = []
    for batch in batches(comparison):
        formats = [found for found in (losses or _with_size(comparison.formats)) if speed_at(found, batch)]
        if formats:
            title = "One request at a time" if batch == 1 else f"{batch} requests at once"
            make = _loss_panel if losses else _size_panel
            panels.append(make(comparison, formats, title, "tokens per second", _speeds(batch), True))
    return panels


def memory_panel(comparison: Comparison) -> Panel | None:
    """Quality against bytes, of formats that have both; None for fewer than two. Its front is the `frontier`."""
    formats = list(weighed(comparison).values())
    if len(formats) < 2:
        return None
    return _loss_panel(comparison, formats, "Size of the weights", "bytes", _bytes, False)


def bytes_of(found: FormatResult) -> int:
    return found.size.bytes if found.size else 0


def _bytes(found: FormatResult) -> float:
    return float(bytes_of(found))


def _speeds(batch: int) -> Callable[[FormatResult], float]:
    def rate(found: FormatResult) -> float:
        speed = speed_at(found, batch)
        return speed.tokens_per_second if speed else 0.0

    return rate


def _with_loss(formats: Sequence[FormatResult]) -> list[FormatResult]:
    return [found for found in formats if (loss := divergence_of(found)) is not None and math.isfinite(loss.value)]


def _with_size(formats: Sequence[FormatResult]) -> list[FormatResult]:
    return [found for found in formats if found.size is not None]


def _loss_panel(
    comparison: Comparison,
    formats: Sequence[FormatResult],
    title: str,
    x_label: str,
    gain: Callable[[FormatResult], float],
    speed: bool,
) -> Panel:
    known = {found.name: loss for found in _with_loss(comparison.formats) if (loss := divergence_of(found)) is not None}
    scale = LossScale.over(list(known.values()))
    styles = looks(comparison)
    dots = tuple(
        Dot(found.name, styles[found.name], gain(found), scale.height(known[found.name].value),
            scale.spread(known[found.name]), _tip(found, gain(found), speed))
        for found in formats
    )  # fmt: skip
    row = any(numbers.is_no_divergence(known[found.name].value) for found in formats)
    return Panel(
        title=title,
        x_label=x_label,
        y_label=LOSS_LABEL,
        better="↗" if speed else "↖",
        more_x_is_better=speed,
        x_text=(lambda value: f"{value:,.5g}") if speed else bytes_tick,
        ticks=scale.ticks(),
        dots=dots,
        break_at=scale.break_at if row else None,
    )


def _size_panel(
    comparison: Comparison,
    formats: Sequence[FormatResult],
    title: str,
    x_label: str,
    gain: Callable[[FormatResult], float],
    speed: bool,
) -> Panel:
    scale, styles = SizeScale(max(bytes_of(found) for found in formats)), looks(comparison)
    dots = tuple(
        Dot(found.name, styles[found.name], gain(found), scale.height(bytes_of(found)), None,
            _tip(found, gain(found), speed))
        for found in formats
    )  # fmt: skip
    return Panel(
        title=title,
        x_label=x_label,
        y_label="bytes of the weights",
        better="↗",
        more_x_is_better=True,
        x_text=lambda value: f"{value:,.5g}",
        ticks=scale.ticks(),
        dots=dots,
    )


def _tip(found: FormatResult, gain: float, speed: bool) -> str:
    """The exact numbers of a dot."""
    lines = [f"{found.name} ({found.description})" if found.description else found.name]
    loss = divergence_of(found)
    if loss is not None:
        lines.append(
            f"KL divergence {numbers.divergence(loss.value)} {numbers.bounds(loss, numbers.divergence)}".rstrip()
        )
    if speed:
        lines.append(f"{numbers.rate(gain)} tokens per second")
    if found.size is not None:
        lines.append(human_bytes(found.size.bytes))
    return "\n".join(lines)
