"""quantkit demo"""

from __future__ import annotations

import click

from quantkit.cli.common import json_option, print_json, print_table, progress_bar
from quantkit.wording import human_bytes

RECIPES = ("llm-int8", "nf4", "rtn-w4g128", "rtn-w3g128")


@click.command("demo", short_help="Quantize the bundled model in several formats and compare.")
@click.option("-o", "--output", default="demo-output", show_default=True, metavar="DIR", help="Folder for the results.")
@click.option("--max-windows", type=click.IntRange(min=1), metavar="N", help="Evaluate N windows only; default: all.")
@json_option
def command(output: str, max_windows: int | None, as_json: bool) -> None:
    """Quantize the bundled model in several formats, measure each on held-out text, and compare.

    \b
    quantkit demo
    quantkit demo --max-windows 4 --json
    """
    from quantkit.eval.formats_table import compare_formats

    with progress_bar("demo") as advance:
        result = compare_formats("demo", RECIPES, output, max_windows=max_windows, on_format=advance)
    if as_json:
        print_json(result.to_dict())
        return
    rows = [
        (
            row.name,
            human_bytes(row.bytes),
            f"{row.bits_per_weight:.2f}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / result.rows[0].perplexity - 1):+.2f} %",
        )
        for row in result.rows
    ]
    print_table(
        "The bundled model in several formats",
        ("format", "bytes", "bits/weight", "held-out perplexity", "change"),
        rows,
        footer=f"bits/weight counts the linear layers with their scales. {result.protocol}",
    )
    click.echo(f"\nThe checkpoints are in {output}/. Try:")
    click.echo(f'  quantkit generate {output}/nf4 "The function returns"')
    click.echo(f"  quantkit inspect {output}/rtn-w4g128")
