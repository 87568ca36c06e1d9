"""quantkit convert"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from quantkit.cli.common import device_option, json_option, output_option, overwrite_option, print_json, progress_bar
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
@click.option(
    "--kv-scales",
    metavar="HOW",
    help="To compressed-tensors: measure scales of an FP8 cache, tensor or attn_head (as quantize has it).",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="[SHARE=]SOURCE",
    help="With --kv-scales: calibration, as in quantize.",
)
@click.option("--samples", type=int, metavar="N", help="With --kv-scales: calibration sequences; default: 128.")
@click.option("--seq-len", type=int, metavar="N", help="With --kv-scales: tokens of each; default: 512.")
@device_option
@overwrite_option
@json_option
def command(
    checkpoint: str,
    to: str,
    output: str,
    kv_scales: str | None,
    texts: tuple[str, ...],
    samples: int | None,
    seq_len: int | None,
    device: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Rewrite CHECKPOINT in another format. The same codes and scales, or a refusal with the reason.

    A model that is not quantized can become a GGUF file for llama.cpp; `quantize -r q4_k_m` writes smaller ones.

    \b
    quantkit convert demo --to gguf -o demo.gguf
    quantkit convert demo-w4 --to compressed-tensors -o demo-w4-ct
    quantkit convert model-awq --to gptq-v2 -o model-gptq
    quantkit convert demo-w4 --to compressed-tensors --kv-scales tensor -o demo-w4-ct
    """
    from quantkit.calibration import Calibration
    from quantkit.calibration_mix import source_of
    from quantkit.convert import convert
    from quantkit.devices import resolve_device

    given: dict[str, Any] = {"source": source_of(texts), "samples": samples, "seq_len": seq_len}
    given = {name: value for name, value in given.items() if value is not None}
    if given and kv_scales is None:
        raise click.UsageError("--text, --samples and --seq-len are what --kv-scales looks at; give it too")
    options: dict[str, Any] = {"kv_scales": kv_scales, "calibration": Calibration(**given)}
    with progress_bar(f"to {to}") as advance:
        report = convert(
            checkpoint, to, output, **options, device=resolve_device(device), overwrite=overwrite, on_layer=advance
        )
    if as_json:
        print_json(asdict(report))
        return
    click.echo(
        f"{report.output}: {report.layers} layers from {report.source_format} to {report.target_format}, "
        f"{human_bytes(report.bytes)}, every decoded weight {'unchanged' if report.exact else 'rounded to it'}"
    )
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
