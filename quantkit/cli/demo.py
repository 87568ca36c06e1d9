"""quantkit demo"""

from __future__ import annotations

from dataclasses import dataclass

import click

from quantkit.cli.common import device_option, json_option, print_json


@dataclass(frozen=True)
class Size:
    """How much of a comparison a demo is: less text than `quantkit compare` takes, with intervals all the same."""

    recipes: tuple[str, ...]
    samples: int  # calibration sequences
    windows: int  # of held-out text
    window: int  # tokens
    layers: bool  # whether the report shows which layers are damaged


WHOLE = Size(("llm-int8", "nf4", "gptq-w4g128", "awq-w4g128", "gptq-w3g128"), 16, 16, 256, layers=True)
QUICK = Size(("llm-int8", "nf4", "rtn-w3g128"), 2, 8, 256, layers=False)  # nothing that searches for long


@click.command("demo", short_help="Compare several formats of the bundled model: one report.")
@click.option("-o", "--output", default="demo-output", show_default=True, metavar="DIR", help="Folder for the results.")
@click.option("--quick", is_flag=True, help="Three formats that are quick to make, and less text.")
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    metavar="N",
    help="Windows of text to measure quality on: 16, or 8 with --quick.",
)
@device_option
@json_option
def command(output: str, quick: bool, windows: int | None, device: str, as_json: bool) -> None:
    """`quantkit compare` on the bundled model: quantize it in several formats, measure each, write a report.

    \b
    quantkit demo --quick
    quantkit demo
    quantkit demo --windows 64 --json
    """
    from quantkit.cli.compare import as_report_json, print_comparison, refuse_if_all_failed, run_comparison
    from quantkit.devices import resolve_device

    size, cpu = QUICK if quick else WHOLE, resolve_device(device) == "cpu"
    options = {
        "windows": windows or size.windows,
        "window": size.window,
        "samples": size.samples,
        "layers": size.layers,
        "card_windows": 0,  # the report measures the same
        "reference": False,
        "device": device,
        "batches": (1,) if cpu else None,
        "in_one_process": cpu,
    }
    comparison, page = run_comparison("demo", size.recipes, output, options)
    if as_json:
        print_json(as_report_json(comparison))
    else:
        print_comparison(comparison, page)
        _print_next(output, quick)
    refuse_if_all_failed(comparison)


def _print_next(output: str, quick: bool) -> None:
    click.echo("\nTry next:")
    lines = {
        f'quantkit generate {output}/nf4 "The function returns"': "text of a quantized model",
        f"quantkit serve {output}/llm-int8": "OpenAI's API and a page; needs the extra `serve`",
        "quantkit demo": "GPTQ and AWQ too, which look at text before they round",
        "quantkit compare org/model -o report": "the same for a model of yours",
    }
    if not quick:
        del lines["quantkit demo"]
    for line, what in lines.items():
        click.echo(f"  {line:<{max(map(len, lines))}}   {what}")
