"""quantkit quantize"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import device_option, json_option, output_option, overwrite_option, print_json, progress_bar
from quantkit.defaults import QUALITY_WINDOWS, SHARD_MB
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.pipeline.report import QuantizeReport
    from quantkit.planning import QuantizePlan


@click.command("quantize", short_help="Quantize a model into a new folder.")
@click.argument("model")
@click.option("-r", "--recipe", required=True, metavar="RECIPE", help="Name (see `quantkit recipes`) or a YAML file.")
@output_option
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the recipe, e.g. format.bits=3.")
@click.option("--target-bits", type=float, metavar="BITS", help="Choose each layer's bits for this average, e.g. 3.5.")
@click.option(
    "--touch-up", type=int, metavar="STEPS", help="At the end let all scales and norms learn together, e.g. 300 steps."
)
@click.option(
    "--kv-scales",
    metavar="HOW",
    help="Measure scales of an FP8 cache: tensor (one for a layer's keys, one for its values) or attn_head (one each).",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="[SHARE=]SOURCE",
    help="Calibration: text or .jsonl file, folder, bundled, or datasets:ORG/NAME; several are mixed by their shares.",
)
@click.option("--samples", type=int, metavar="N", help="Calibration sequences; default: the recipe's, else 128.")
@click.option("--seq-len", type=int, metavar="N", help="Tokens per calibration sequence; default: 512.")
@click.option("--seed", type=int, metavar="N", help="Which sequences of the text are taken; default: 0.")
@device_option
@click.option(
    "--quality-windows",
    default=QUALITY_WINDOWS,
    show_default=True,
    metavar="N",
    help="Windows of held-out text to measure the result on; 0: do not measure.",
)
@click.option("--shard-size", default=SHARD_MB, show_default=True, metavar="MB", help="Largest weight file to write.")
@click.option(
    "--dry-run", is_flag=True, help="Only print what would be done, what it needs, and which engines load the result."
)
@click.option("--restart", is_flag=True, help="Throw away what an interrupted run has finished.")
@overwrite_option
@json_option
def command(
    model: str,
    recipe: str,
    output: str,
    changes: tuple[str, ...],
    target_bits: float | None,
    touch_up: int | None,
    kv_scales: str | None,
    texts: tuple[str, ...],
    samples: int | None,
    seq_len: int | None,
    seed: int | None,
    device: str,
    quality_windows: int,
    shard_size: int,
    dry_run: bool,
    restart: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantize MODEL by a recipe and write a standard checkpoint.

    \b
    quantkit quantize demo -r gptq-w4g128 -o demo-gptq
    quantkit quantize demo -r awq-w4g128 -o demo-awq --text my-domain.jsonl --samples 64
    quantkit quantize demo -r best-w4g128 -o demo-best --text 2=bundled --text chats.jsonl --text src/
    quantkit quantize demo -r auto-w3.5 -o demo-mixed --target-bits 4.25
    quantkit quantize demo -r tuned-w4g64 -o demo-few --target-bits 2.5
    quantkit quantize demo -r tuned-w3g64 -o demo-w3 --touch-up 300
    quantkit quantize demo -r rtn-w4g128-ct -o demo-w4 --kv-scales tensor
    quantkit quantize org/model -r nf4 -o model-nf4 --json
    quantkit quantize org/model -r gptq-w4g128 -o model-w4 --dry-run
    quantkit quantize org/model -r q4_k_m -o model.gguf

    The output appears under its name only when every tensor was read back from disk and verified. A run that was
    interrupted goes on where it was when the same command is given again.
    """
    from quantkit.calibration import Calibration
    from quantkit.calibration_mix import source_of
    from quantkit.devices import resolve_device
    from quantkit.pipeline import quantize
    from quantkit.pipeline.job import prepare
    from quantkit.planning import make_plan
    from quantkit.recipe import load_recipe

    if shard_size < 1:
        raise click.UsageError(f"--shard-size is {shard_size}, but must be at least 1 MB")
    if target_bits is not None:
        changes = (*changes, *_mixing(recipe, changes, target_bits))
    if touch_up is not None:
        changes = (*changes, f"touch_up={touch_up}")
    if kv_scales is not None:
        changes = (*changes, f"kv_scales={kv_scales}")
    loaded = load_recipe(recipe, changes)
    chosen: dict[str, Any] = {"source": source_of(texts), "samples": samples, "seq_len": seq_len, "seed": seed}
    calibration = Calibration.from_recipe(loaded.calibration, **chosen)
    asked: dict[str, Any] = {
        "calibration": calibration,
        "device": resolve_device(device),
        "overwrite": overwrite,
        "restart": restart,
        "shard_bytes": shard_size * 1_000_000,
        "quality_windows": quality_windows,
    }
    if dry_run:
        _print_plan(make_plan(prepare(model, loaded, output, **asked)), as_json)
        return
    with progress_bar(loaded.name, memory_of=asked["device"]) as advance:
        report = quantize(model, loaded, output, **asked, on_layer=advance)
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)


def _mixing(recipe: str, changes: tuple[str, ...], target_bits: float) -> tuple[str, ...]:
    """The changes for `--target-bits`; says so where layers need another layout than the recipe's."""
    from quantkit.recipe import load_recipe
    from quantkit.recipe.limits import target_bits_changes

    loaded = load_recipe(recipe, changes)
    more = target_bits_changes(loaded, target_bits)
    if len(more) > 1:
        click.echo(f"note: layout {loaded.format.name} has one scheme for all layers; {more[0]} instead", err=True)
    return more


def _print_plan(plan: QuantizePlan, as_json: bool) -> None:
    from quantkit.planning import describe

    if as_json:
        print_json(plan.to_dict())
        return
    lines = describe(plan)
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        click.echo(f"{label:{width}}  {text}")


def _print_report(report: QuantizeReport) -> None:
    from quantkit.formats.kv_scheme import describe_summary

    click.echo(
        f"{report.output}: {report.format}, {len(report.layers)} layers at "
        f"{report.bits_per_weight:.2f} bits per weight; "
        f"{human_bytes(report.source_bytes)} -> {human_bytes(report.bytes)}, read back and verified"
    )
    if report.quality is not None:
        change = 100 * (report.quality.perplexity / report.quality.base_perplexity - 1)
        click.echo(
            f"held-out perplexity {report.quality.base_perplexity:.3f} -> {report.quality.perplexity:.3f} "
            f"({change:+.2f} %), KL {report.quality.kl:.4f} nats per token; {report.quality.protocol}"
        )
    else:
        click.echo("quality was not measured; `quantkit eval` can do it later")
    if report.touch_up is not None:
        found = report.touch_up
        click.echo(
            f"touch-up: KL {found['start_kl']:.4f} -> {found['kl']:.4f} on calibration sequences held back, "
            f"best after step {found['step']} of {found['steps']}"
        )
    if report.kv_scales is not None:
        click.echo(f"scales of an FP8 cache: {describe_summary(report.kv_scales)}")
    worst = max(report.layers, key=lambda layer: layer.log.get("loss", layer.relative_error))
    name = "loss" if "loss" in worst.log else "weight error"
    value = worst.log.get("loss", worst.relative_error)
    click.echo(f"largest {name}: {value:.4f} ({worst.module}, {worst.scheme})")
    if report.experts is not None:
        click.echo(f"experts: {report.experts.describe()}")
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
