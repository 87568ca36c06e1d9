"""The tables of a report as values; the page and Markdown spell out the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.eval.compare.results import Comparison, FormatResult, Running
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.quality.measure import QualityResult
from quantkit.eval.quality.paired import perplexity_quotient
from quantkit.eval.report import numbers
from quantkit.eval.report.rules import first_batch, speed_at
from quantkit.wording import human_bytes, human_count

SAME_BACKEND = 0.01  # of perplexity: what rounding in another order may change


@dataclass(frozen=True)
class Cell:
    text: str = numbers.NOTHING
    detail: str = ""  # the confidence interval
    order: float | None = None  # to sort by; None: last


@dataclass(frozen=True)
class Column:
    title: str
    group: str = ""  # neighbours of one group stand under it
    meaning: str = ""  # in one line


@dataclass(frozen=True)
class Row:
    name: str
    detail: str
    cells: tuple[Cell, ...]
    error: str | None = None
    baseline: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]  # without the first, which has the names
    rows: tuple[Row, ...]
    first: str = "format"

    def __bool__(self) -> bool:
        return bool(self.rows and self.columns)


Measure = tuple[Column, Callable[[FormatResult], Cell]]


def main_table(comparison: Comparison) -> Table:
    """Every format, also those that failed; columns without any number are left out."""
    return _table(
        "All formats", [*_sizes(), *_losses(), *_speeds(comparison), *_service(comparison)], comparison.formats
    )


def quality_table(comparison: Comparison) -> Table:
    """Every number of the quality measurement."""
    measures = [
        _quality("perplexity", lambda found: found.perplexity, numbers.exact_perplexity),
        _quality("bits per byte", lambda found: found.bits_per_byte, lambda value: f"{value:.4f}"),
        _quality("unquantized perplexity", lambda found: found.base_perplexity, numbers.exact_perplexity),
        _quality("change", lambda found: found.perplexity_ratio, numbers.change),
        _quality("KL divergence", lambda found: found.kl, numbers.divergence),
        _quality("KL, 99 of 100 below", lambda found: found.kl_p99, numbers.divergence),
        _quality("same first choice", lambda found: found.top1_agreement, numbers.share),
    ]
    return _table("Quality in full", measures, [found for found in comparison.formats if found.quality])


def check_table(comparison: Comparison) -> Table:
    """The runtime beside transformers with decoded weights: kernels that compute wrongly would show here."""
    both = [found for found in comparison.formats if found.quality and found.reference_quality]

    def other(found: FormatResult) -> Cell:
        return _interval(_reference_perplexity(found), numbers.exact_perplexity)

    def quotient(found: FormatResult) -> Cell:
        return _interval(_runtime_quotient(found), numbers.change)

    def agree(found: FormatResult) -> Cell:
        return Cell("yes" if runtime_agrees(found) else "NO")

    measures: list[Measure] = [
        _quality("perplexity on this runtime", lambda found: found.perplexity, numbers.exact_perplexity),
        (Column("perplexity on transformers"), other),
        (Column("runtime beside transformers"), quotient),
        (Column(f"agree within {100 * SAME_BACKEND:.0f} %"), agree),
    ]
    return _table("Checked against transformers", measures, both)


def speed_table(comparison: Comparison) -> Table:
    """Every load of every format."""
    columns = ("requests at once", "prompt tokens", "new tokens", "tokens/s", "first token", "gap between tokens")
    rows = []
    for found in comparison.formats:
        for speed in found.running.speeds if found.running else ():
            limit = speed.percent_of_limit
            cells = (
                Cell(f"{speed.batch:,}", order=speed.batch),
                Cell(f"{speed.prompt:,}", order=speed.prompt),
                Cell(f"{speed.new:,}", order=speed.new),
                Cell(numbers.rate(speed.tokens_per_second), order=speed.tokens_per_second),
                Cell(numbers.milliseconds(speed.first_token_ms), order=speed.first_token_ms),
                Cell(numbers.milliseconds(speed.gap_ms), order=speed.gap_ms),
                Cell() if limit is None else Cell(f"{limit:.1f} %", order=limit),
            )
            rows.append(Row(found.name, "", cells, baseline=found.baseline))
    named = (*(Column(title) for title in columns), Column("of the memory limit"))
    return _without_empty_columns(Table("Every load", named, tuple(rows)))


def memory_table(comparison: Comparison) -> Table:
    """What quantizing and running took."""
    measures: list[Measure] = [
        (Column("weights in memory"), lambda found: _running(found, lambda one: one.weights_bytes, human_bytes)),
        (Column("cache tokens that fit"), lambda found: _running(found, lambda one: one.kv_tokens, "{:,}".format)),
        (Column("peak, running"), lambda found: _running(found, lambda one: one.peak_bytes, human_bytes)),
        (Column("ready in"), lambda found: _running(found, lambda one: one.ready_seconds, numbers.seconds)),
        (Column("quantized in"), lambda found: _number(_seconds(found), numbers.seconds)),
        (
            Column("peak, quantizing"),
            lambda found: _number(found.making.peak_bytes if found.making else None, human_bytes),
        ),
    ]
    return _table("Memory and time", measures, [found for found in comparison.formats if found.running or found.making])


def _sizes() -> list[Measure]:
    size = Column("size", "", "Bytes of all weights: on disk, or in memory where there are no files.")
    bits = Column("bits/\u200bweight", "", "Bits for one weight of the quantized layers, scales included.")
    return [
        (size, lambda found: _number(found.size.bytes if found.size else None, human_bytes)),
        (bits, lambda found: _number(found.size.bits_per_weight if found.size else None, "{:.2f}".format)),
    ]


def _losses() -> list[Measure]:
    def measure(
        title: str,
        meaning: str,
        part: Callable[[QualityResult], Interval | None],
        spell: Callable[[float], str],
        spell_bound: Callable[[float], str] | None = None,
    ) -> Measure:
        column = Column(title, "quality", meaning)
        return column, lambda found: _interval(part(found.quality) if found.quality else None, spell, spell_bound)

    return [
        measure(
            "perplexity",
            "How surprised the model is by held-out text; lower is better.",
            lambda found: found.perplexity,
            numbers.perplexity,
        ),
        measure(
            "change",
            "Perplexity beside the unquantized model's on the same windows; below 0 it happened to help.",
            lambda found: found.perplexity_ratio,
            numbers.change,
            numbers.rough_change,
        ),
        measure(
            "KL divergence",
            "How far predicted probabilities moved from the unquantized model's, in nats per token; 0 is no change.",
            lambda found: found.kl,
            numbers.divergence,
            lambda nats: numbers.divergence(nats, 2),
        ),
        measure(
            "same first choice",
            "How often both models think the same token most likely.",
            lambda found: found.top1_agreement,
            lambda value: numbers.share(value, 1),
        ),
    ]


def _speeds(comparison: Comparison) -> list[Measure]:
    meaning = "Output tokens of all requests in a second, for so many requests at once; prompts included in the time."
    found = sorted({speed.batch for one in comparison.formats if one.running for speed in one.running.speeds})
    return [(Column(f"{batch:,}", "tokens/s for N at once", meaning), _rate_at(batch)) for batch in found]


def _rate_at(batch: int) -> Callable[[FormatResult], Cell]:
    def cell(found: FormatResult) -> Cell:
        speed = speed_at(found, batch)
        return _number(speed.tokens_per_second if speed else None, numbers.rate)

    return cell


def _service(comparison: Comparison) -> list[Measure]:
    batch = first_batch(comparison.formats)

    def first_token(found: FormatResult) -> Cell:
        speed = speed_at(found, batch)
        return _number(speed.first_token_ms if speed else None, numbers.milliseconds)

    group = "service"
    first = f"Median time until the first token of an answer, {batch} at once."
    return [
        (Column("first token", group, first), first_token),
        (
            Column(
                "cache tokens",
                group,
                "Tokens of context that fit into memory beside the weights, all requests together.",
            ),
            lambda found: _running(found, lambda one: one.kv_tokens, human_count),
        ),
        (
            Column("ready in", group, "From start to ready for requests."),
            lambda found: _running(found, lambda one: one.ready_seconds, numbers.seconds),
        ),
        (
            Column(
                "quantized in",
                group,
                "How long `quantkit quantize` took, verification included.",
            ),
            lambda found: _number(_seconds(found), numbers.seconds),
        ),
    ]


def _quality(
    title: str, part: Callable[[QualityResult], Interval | None], spell: Callable[[float], str]
) -> Measure:  # fmt: skip
    return Column(title), lambda found: _interval(part(found.quality) if found.quality else None, spell)


def _interval(
    found: Interval | None, spell: Callable[[float], str], spell_bound: Callable[[float], str] | None = None
) -> Cell:
    if found is None:
        return Cell()
    return Cell(spell(found.value), numbers.bounds(found, spell_bound or spell), found.value)


def _seconds(found: FormatResult) -> float | None:
    return found.making.seconds if found.making else None


def runtime_agrees(found: FormatResult) -> bool:
    """Whether both computed the same: the whole interval of their paired quotient is next to 1. That no difference can
    be shown would not be enough, and that one can be shown is no fault: both round, each in its own order."""
    assert found.quality is not None
    assert found.reference_quality is not None
    quotient = _runtime_quotient(found)
    if quotient is None:
        return found.quality.perplexity.overlaps(found.reference_quality.perplexity)
    low = quotient.value if quotient.low is None else quotient.low
    return low >= 1 - SAME_BACKEND and quotient.upper <= 1 + SAME_BACKEND


def _runtime_quotient(found: FormatResult) -> Interval | None:
    both = found.quality, found.reference_quality
    return perplexity_quotient(both[0], both[1]) if both[0] is not None and both[1] is not None else None


def _reference_perplexity(found: FormatResult) -> Interval | None:
    return found.reference_quality.perplexity if found.reference_quality else None


def _number(value: float | None, spell: Callable[[float], str]) -> Cell:
    return Cell() if value is None else Cell(spell(value), order=value)


def _running(
    found: FormatResult, part: Callable[[Running], float | None], spell: Callable[[float], str]
) -> Cell:  # fmt: skip
    return _number(part(found.running) if found.running else None, spell)


def _table(title: str, measures: Sequence[Measure], formats: Sequence[FormatResult]) -> Table:
    rows = tuple(
        Row(found.name, found.description, tuple(cell(found) for _, cell in measures), found.error, found.baseline)
        for found in formats
    )
    return _without_empty_columns(Table(title, tuple(column for column, _ in measures), rows))


def _without_empty_columns(table: Table) -> Table:
    nothing = Cell()
    kept = [place for place in range(len(table.columns)) if any(row.cells[place] != nothing for row in table.rows)]
    rows = tuple(
        Row(row.name, row.detail, tuple(row.cells[place] for place in kept), row.error, row.baseline)
        for row in table.rows
    )  # fmt: skip
    return Table(table.title, tuple(table.columns[place] for place in kept), rows, table.first)
