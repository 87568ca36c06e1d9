"""quantkit inspect"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quantkit.cli.common import json_option, print_json, print_table
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.inspection import Inspection


@click.command("inspect", short_help="Show what is inside a checkpoint and which engines load it.")
@click.argument("checkpoint")
@json_option
def command(checkpoint: str, as_json: bool) -> None:
    """Show format, bits, groups, bytes per part and per layer of CHECKPOINT, and which engines load it.

    \b
    quantkit inspect demo
    quantkit inspect demo-nf4 --json
    """
    from quantkit.inspection import inspect_checkpoint

    found = inspect_checkpoint(checkpoint)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)


def _print(found: Inspection) -> None:
    method = found.quant_method or "not quantized"
    click.echo(f"{found.folder}: {found.model_type}, {found.dtype}, {method}")
    click.echo(
        f"{found.parameters:,} parameters in {human_bytes(found.bytes)}: {found.bits_per_weight:.2f} bits each"
        + (f", {found.quantized_bits_per_weight:.2f} in quantized layers" if found.quantized_bits_per_weight else "")
    )
    if found.schemes:
        print_table("Schemes", ("scheme", "modules"), list(found.schemes.items()))
    _sizes("Bytes per part", "part", found.part_bytes, found.bytes)
    _sizes("Bytes per layer", "layer", found.layer_bytes, found.bytes)
    rows = [(verdict.engine, "yes" if verdict.loads else "no", verdict.remark) for verdict in found.engines]
    print_table("Engines", ("engine", "loads", "remark"), rows)


def _sizes(title: str, what: str, sizes: dict[str, int], total: int) -> None:
    rows = [(name, human_bytes(size), f"{100 * size / total:.1f} %") for name, size in sizes.items()]
    print_table(title, (what, "bytes", "share"), rows)
