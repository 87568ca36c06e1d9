"""quantkit quantize"""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.common import human_bytes, json_option, output_option, overwrite_option, print_json, progress_bar


@click.command("quantize", short_help="Quantize a model into a new folder.")
@click.argument("model")
@click.option("-r", "--recipe", required=True, metavar="RECIPE", help="Name (see `quantkit recipes`) or a YAML file.")
@output_option
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the recipe, e.g. format.bits=3.")
@click.option("--text", type=Path, metavar="FILE", help="Calibration text; default: the one that ships.")
@click.option("--samples", default=128, show_default=True, help="Calibration sequences, for methods that need data.")
@click.option("--seq-len", default=512, show_default=True, help="Tokens per calibration sequence.")
@click.option("--seed", default=0, show_default=True, help="Which sequences of the text are taken.")
@click.option("--shard-size", default=1000, show_default=True, metavar="MB", help="Largest weight file to write.")
@overwrite_option
@json_option
def command(
    model: str,
    recipe: str,
    output: str,
    changes: tuple[str, ...],
    text: Path | None,
    samples: int,
    seq_len: int,
    seed: int,
    shard_size: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantize MODEL by a recipe and write a standard checkpoint.

    \b
    quantkit quantize demo -r rtn-w4g128 -o demo-w4
    quantkit quantize demo -r gptq-w4g128 -o demo-gptq --samples 64
    quantkit quantize org/model -r nf4 -o model-nf4 --json
    quantkit quantize demo -r rtn-w4g128 --set format.group_size=64 -o demo-w4g64

    The output appears under its name only when every layer was read back from disk and verified.
    """
    from quantkit.bundled import CALIBRATION_TEXT
    from quantkit.calibration import Calibration
    from quantkit.pipeline import quantize
    from quantkit.recipe import load_recipe

    if shard_size < 1:
        raise click.UsageError(f"--shard-size is {shard_size}, but must be at least 1 MB")
    loaded = load_recipe(recipe, changes)
    with progress_bar(f"{loaded.name}") as advance:
        report = quantize(
            model,
            loaded,
            output,
            calibration=Calibration(text or CALIBRATION_TEXT, samples, seq_len, seed),
            overwrite=overwrite,
            shard_bytes=shard_size * 1_000_000,
            on_layer=advance,
        )
    if as_json:
        print_json(report.to_dict())
        return
    worst = max(report.layers, key=lambda layer: layer.relative_error)
    click.echo(
        f"{report.output}: {report.format}, {len(report.layers)} layers at {report.bits_per_weight:.2f} bits a weight; "
        f"{human_bytes(report.source_bytes)} -> {human_bytes(report.bytes)}, read back and verified"
    )
    click.echo(f"largest weight error: {worst.relative_error:.4f} ({worst.module}, {worst.scheme})")
