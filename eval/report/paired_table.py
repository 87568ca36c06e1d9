"""The numbers behind "cannot be told apart": every format beside the least lossy one, window by window."""

from __future__ import annotations

from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.quality.paired import kl_difference, perplexity_quotient
from quantkit.eval.report import numbers
from quantkit.eval.report.rules import divergence_of, same_quality
from quantkit.eval.report.tables import Cell, Column, Row, Table


def paired_table(comparison: Comparison) -> Table:
    """Empty where fewer than two quantized formats can be paired."""
    judged = [found for found in comparison.formats if not found.baseline and divergence_of(found) is not None]
    if not judged:
        return Table("", (), ())
    best = min(judged, key=_divergence)
    rows = tuple(row for found in judged if found is not best and (row := _row(found, best)) is not None)
    columns = ("KL divergence above it", "perplexity beside its", "told apart")
    return Table(f"Beside {best.name}, window by window", tuple(Column(title) for title in columns), rows)


def _row(found: FormatResult, best: FormatResult) -> Row | None:
    assert found.quality is not None
    assert best.quality is not None
    difference = kl_difference(found.quality, best.quality)
    if difference is None:
        return None
    quotient = perplexity_quotient(found.quality, best.quality)
    cells = (
        Cell(_nats(difference.value), numbers.bounds(difference, _nats), difference.value),
        _quotient(quotient),
        Cell("no" if same_quality(found, best) else "yes"),
    )
    return Row(found.name, "", cells)


def _quotient(found: Interval | None) -> Cell:
    return Cell() if found is None else Cell(numbers.change(found.value), numbers.bounds(found, numbers.change))


def _nats(value: float) -> str:
    """A difference may be below 0, at least at the end of its interval."""
    sign = "\N{MINUS SIGN}" if value < 0 else "+"
    return f"{sign}{numbers.divergence(abs(value))}"


def _divergence(found: FormatResult) -> float:
    loss = divergence_of(found)
    assert loss is not None
    return loss.value
