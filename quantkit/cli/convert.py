"""quantkit convert"""

from __future__ import annotations

from dataclasses import asdict

import click

from quantkit.cli.common import json_option, output_option, overwrite_option, print_json, progress_bar
from quantkit.wording import human_bytes


@click.command("convert", short_help="Rewrite a quantized checkpoint in another format.")
@click.argument("checkpoint")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="gptq, gptq-v2, awq, compressed-tensors, w8a8, nf4-plain, ct-mxfp4, gguf, gguf-f16 ...",
)
@output_option
@overwrite_option
@json_option
def command(checkpoint: str, to: str, output: str, overwrite: bool, as_json: bool) -> None:
    """Rewrite CHECKPOINT in another format. The same codes and scales, or a refusal with the reason.

    A model that is not quantized can become a GGUF file for llama.cpp; `quantize -r q4_k_m` writes smaller ones.

    \b
    quantkit convert demo --to gguf -o demo.gguf
    quantkit convert demo-w4 --to compressed-tensors -o demo-w4-ct
    quantkit convert model-awq --to gptq-v2 -o model-gptq
    """
    from quantkit.convert import convert

    with progress_bar(f"to {to}") as advance:
        report = convert(checkpoint, to, output, overwrite=overwrite, on_layer=advance)
    if as_json:
        print_json(asdict(report))
        return
    click.echo(
        f"{report.output}: {report.layers} layers from {report.source_format} to {report.target_format}, "
        f"{human_bytes(report.bytes)}, every decoded weight {'unchanged' if report.exact else 'rounded to it'}"
    )
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
