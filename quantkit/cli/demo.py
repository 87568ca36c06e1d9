"""quantkit demo"""

from __future__ import annotations

import click

from quantkit.cli.common import device_option, json_option, print_json

RECIPES = ("llm-int8", "nf4", "rtn-w4g128", "gptq-w4g128", "awq-w4g128", "gptq-w3g128")
SAMPLES = 32  # calibration sequences: a quarter of the usual, so that minutes are enough on two cores


@click.command("demo", short_help="Compare several formats of the bundled model: one report.")
@click.option("-o", "--output", default="demo-output", show_default=True, metavar="DIR", help="Folder for the results.")
@click.option(
    "--windows",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Windows of text to measure quality on.",
)
@device_option
@json_option
def command(output: str, windows: int, device: str, as_json: bool) -> None:
    """`quantkit compare` on the bundled model: quantize it in several formats, measure each, write a report.

    \b
    quantkit demo
    quantkit demo --windows 4 --json
    """
    from quantkit.cli.compare import as_report_json, print_comparison, refuse_if_all_failed, run_comparison

    options = {"windows": windows, "device": device, "samples": SAMPLES, "no_reference": True}
    comparison, page = run_comparison("demo", RECIPES, output, options)
    if as_json:
        print_json(as_report_json(comparison))
    else:
        print_comparison(comparison, page)
        click.echo("Try the checkpoints:")
        click.echo(f'  quantkit generate {output}/nf4 "The function returns"')
        click.echo(f"  quantkit serve {output}/gptq-w4g128")
    refuse_if_all_failed(comparison)
