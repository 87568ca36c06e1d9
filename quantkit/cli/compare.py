"""quantkit compare"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import device_option, json_option, print_json, print_table
from quantkit.cli.comparison_bar import ComparisonBar
from quantkit.defaults import WINDOW
from quantkit.errors import InputError, QuantkitError
from quantkit.extras import require
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.eval.compare.results import Comparison, FormatResult
    from quantkit.eval.quality.bootstrap import Interval


@click.command("compare", short_help="Quality, speed and memory of every format, in one report.")
@click.argument("model")
@click.option(
    "-r", "--recipe", "recipes", multiple=True, metavar="RECIPE", help="Recipe to compare; may be given several times."
)
@click.option(
    "-c",
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="DIR",
    help="Also compare this checkpoint, made elsewhere.",
)
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder of the report; run again to go on.")
@click.option(
    "--text", metavar="FILE", help="Quality: a text as in `quantkit eval`; default: the held-out text that ships."
)
@click.option(
    "--windows",
    default=32,
    show_default=True,
    type=click.IntRange(min=1),
    help="Windows of text to measure quality on.",
)
@click.option("--window", default=WINDOW, show_default=True, type=click.IntRange(min=2), help="Tokens per window.")
@click.option(
    "--calibration",
    multiple=True,
    metavar="[SHARE=]SOURCE",
    help="As --text of `quantkit quantize`, for all recipes alike.",
)
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Calibration sequences.")
@click.option("--seq-len", type=click.IntRange(min=2), metavar="N", help="Tokens per calibration sequence.")
@click.option("--batch", metavar="N,...", help="Concurrent requests; default: 1,8,32,256, on a CPU 1,4.")
@click.option(
    "--new-tokens", type=click.IntRange(min=2), metavar="N", help="Tokens per answer; default: 256, on a CPU 32."
)
@click.option("--no-reference", is_flag=True, help="Measure quality on quantkit's runtime only, not on transformers.")
@device_option
@click.option("--seed", default=0, show_default=True, help="Seed of calibration, prompts and intervals.")
@json_option
def command(model: str, recipes: tuple[str, ...], output: str, as_json: bool, **options: Any) -> None:
    """Quantize MODEL by every recipe, measure each the same way, and write report.html.

    \b
    quantkit compare demo -o demo-report
    quantkit compare org/model -r gptq-w4g128 -r nf4 -o report --text wikitext2
    quantkit compare org/model -c model-from-elsewhere -o report --calibration my.jsonl --calibration 2=bundled
    quantkit compare llama-3.1-8b -o shape-report        # speed and memory of a shape, with random weights

    MODEL is a folder, a hub name, `demo`, or the name of a shape. Without -r: the usual six formats. What is measured
    is kept: the same command goes on where it was. The folder holds report.html (works offline), report.md,
    report.json, charts as PNG, and the checkpoints.
    """
    from quantkit.calibration_mix import source_of

    options["reference"] = not options.pop("no_reference")
    options["calibration"] = source_of(options["calibration"])
    options["batches"] = _batches(options.pop("batch"))
    comparison, page = run_comparison(model, recipes, output, options)
    if as_json:
        print_json(as_report_json(comparison))
    else:
        print_comparison(comparison, page)
    refuse_if_all_failed(comparison)


def run_comparison(
    model: str, recipes: Sequence[str], output: str, options: Mapping[str, Any]
) -> tuple[Comparison, Path]:
    """Measures and writes the report; its page comes back too. `options` are those of `quantkit.compare`; None says
    nothing, and so do no recipes."""
    require("a report", "report")
    from quantkit.eval.compare.public import compare
    from quantkit.eval.report.write import PAGE

    given = {"recipes": recipes or None, **options}
    given = {name: value for name, value in given.items() if value is not None}
    comparison = compare(model, output=output, command=_again(), watch=ComparisonBar, **given)
    return comparison, Path(output) / PAGE


def _batches(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--batch is '{text}', but takes whole numbers such as 1,8,32") from None


def _again() -> str:
    """The command that was given."""
    import sys

    return shlex.join(["quantkit", *sys.argv[1:]])


def as_report_json(comparison: Comparison) -> dict[str, Any]:
    """What report.json holds."""
    from quantkit.eval.report.verdict import judge
    from quantkit.eval.report.write import report_numbers

    return report_numbers(comparison, judge(comparison))


def print_comparison(comparison: Comparison, page: Path) -> None:
    from quantkit.eval.report.frontier import frontier
    from quantkit.eval.report.sources import source_lines
    from quantkit.eval.report.verdict import judge

    kept = frontier(comparison)
    batches = sorted({speed.batch for found in comparison.formats if found.running for speed in found.running.speeds})
    columns = ["format", "bytes", "bits/weight", "perplexity", "change", "KL", *(f"tokens/s x{n}" for n in batches)]
    rows = [[found.name + " *" * (found.name in kept), *_cells(found, batches)] for found in comparison.formats]
    footer = ["±: half of the 95 % interval"] if any("±" in cell for row in rows for cell in row) else []
    footer += ["*: on the frontier, no other format has both fewer bytes and less KL"] if kept else []
    print_table(f"{comparison.model} on {comparison.machine.device}", columns, rows, "; ".join(footer))
    for found in comparison.formats:
        if found.error:
            click.echo(f"{found.name} failed: {found.error}")
    for note in comparison.notes:
        click.echo(f"note: {note}")
    for what, text in source_lines(comparison):
        click.echo(f"{what}: {text}")
    click.echo("\n" + " ".join(judge(comparison).sentences))
    click.echo(f"\nThe report: {page}")


def _cells(found: FormatResult, batches: Sequence[int]) -> list[str]:
    quality, size = found.quality, found.size
    kl, ratio = (quality.kl, quality.perplexity_ratio) if quality and not found.baseline else (None, None)
    speeds = {speed.batch: f"{speed.tokens_per_second:,.0f}" for speed in found.running.speeds} if found.running else {}
    return [
        human_bytes(size.bytes) if size else "-",
        f"{size.bits_per_weight:.2f}" if size else "-",
        f"{quality.perplexity.value:.3f}" if quality else "-",
        f"{100 * (ratio.value - 1):+.2f}{_doubt(ratio, '.2f', 100)} %" if ratio else "-",
        f"{kl.value:.4f}{_doubt(kl, '.4f')}" if kl else "-",
        *(speeds.get(batch, "-") for batch in batches),
    ]


def _doubt(value: Interval, digits: str, scale: float = 1) -> str:
    """Half of the 95 % interval; nothing where one window cannot tell."""
    if value.low is None or value.high is None:
        return ""
    return f" ±{scale * (value.high - value.low) / 2:{digits}}"


def refuse_if_all_failed(comparison: Comparison) -> None:
    if all(found.error for found in comparison.formats):
        raise QuantkitError(f"every format failed; the first: {comparison.formats[0].error}")
