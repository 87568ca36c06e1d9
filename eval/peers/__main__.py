"""python -m quantkit.eval.peers"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from quantkit.devices import resolve_device
from quantkit.errors import QuantkitError
from quantkit.eval.peers.bases import find_base
from quantkit.eval.peers.jobs import TOOLS, Job, chosen
from quantkit.eval.peers.pages import write_pages
from quantkit.eval.peers.rows import RESULTS, keep, newest, read
from quantkit.eval.peers.run import Bench, race, run
from quantkit.eval.peers.table import markdown


@click.command()
@click.option("--model", default="demo", show_default=True, type=click.Choice(["demo", "smollm2"]))
@click.option("--tool", "tools", multiple=True, type=click.Choice(list(TOOLS)), help="Only this one; may be repeated.")
@click.option("--method", "methods", multiple=True, help="Only this one, e.g. gptq; may be repeated.")
@click.option("--calibration", "texts", multiple=True, type=click.Choice(["default", "in-domain"]))
@click.option("--wikitext", type=click.Path(path_type=Path), help="A folder with WikiText-2; default: from the hub.")
@click.option("--work", default=".peers", show_default=True, type=click.Path(path_type=Path), help="For what is made.")
@click.option("--device", default="auto", show_default=True)
@click.option(
    "--packages", multiple=True, metavar="TOOL=FOLDER", help="Run a tool with this Python and packages from a folder."
)
@click.option("-o", "--output", default=RESULTS, show_default=True, type=click.Path(path_type=Path))
@click.option("--again", is_flag=True, help="Also what this folder of work has finished before.")
@click.option("--table", is_flag=True, help="Only print the newest rows of the model, as the pages have them.")
@click.option("--write", is_flag=True, help="With --table: put them into the pages.")
def command(
    model: str, tools: tuple[str, ...], methods: tuple[str, ...], texts: tuple[str, ...], wikitext: Path | None,
    work: Path, device: str, packages: tuple[str, ...], output: Path, again: bool, table: bool, write: bool,
) -> None:  # fmt: skip
    """Quantize a model with the tools of other projects and with quantkit, and measure all results alike.

    \b
    make peers
    python -m quantkit.eval.peers --model smollm2 --wikitext FOLDER
    python -m quantkit.eval.peers --model smollm2 --table --write
    """
    if table:
        click.echo(markdown(newest(read(output)), model))
        if write:
            write_pages(newest(read(output)))
        return
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    base = find_base(model, work, wikitext and wikitext.resolve())
    bench = Bench(base, work, resolve_device(device), _folders(packages))
    failed = [job for job in chosen(model, tools, methods) if not _finish(bench, job, texts, output, again)]
    click.echo(markdown(newest(read(output)), model))
    if failed:
        raise SystemExit(1)


def _folders(given: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for one in given:
        tool, _, folder = one.partition("=")
        if tool not in TOOLS or not folder or not Path(folder).is_dir():
            raise click.BadParameter(f"'{one}' is no TOOL=FOLDER; tools: {', '.join(TOOLS)}", param_hint="--packages")
        found[tool] = Path(folder).resolve()
    return found


def _finish(bench: Bench, job: Job, texts: tuple[str, ...], output: Path, again: bool) -> bool:
    """A row for each calibration. One tool that fails does not keep the others from running."""
    names = list(bench.base.calibrations) if job.calibrated else [None]
    for calibration in names:
        if texts and calibration is not None and calibration not in texts:
            continue
        done = bench.folder(job, calibration) / "measured"
        if done.exists() and not again:
            continue
        said = f"{bench.base.name}: {job.tool} {job.method}, {job.bits} bits, calibration {calibration or 'none'}"
        try:
            row = run(bench, job, calibration)
            keep(output, row)
            if job.tool == "llama.cpp" and job.tool not in bench.packages:
                race(bench, job, calibration)
        except QuantkitError as error:
            click.echo(f"{said}: {error}", err=True)
            return False
        done.touch()
        click.echo(f"{said}: perplexity {row.perplexity:.2f}, KL {row.kl:.4f}, {row.seconds:.0f} s", err=True)
    return True


def main() -> None:
    """What is wrong is said in one line."""
    try:
        command()
    except QuantkitError as error:
        click.echo(f"peers: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
