"""quantkit eval"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import json_option, print_json, progress_bar

if TYPE_CHECKING:
    from quantkit.eval.divergence import Divergence
    from quantkit.eval.perplexity import Perplexity


@click.command("eval", short_help="Measure perplexity, and KL divergence from a base model.")
@click.argument("model")
@click.option("--text", type=Path, metavar="FILE", help="A UTF-8 text; default: the held-out text that ships.")
@click.option("--window", default=1024, show_default=True, metavar="N", help="Tokens per window.")
@click.option("--max-windows", type=click.IntRange(min=1), metavar="N", help="Stop after N windows; default: all.")
@click.option("--base", metavar="MODEL", help="Also measure how far MODEL's predictions are from this one's.")
@click.option("--kl-windows", type=click.IntRange(min=1), metavar="N", help="Windows compared with --base; default: 8.")
@click.option(
    "--exact-activations", is_flag=True, help="Round weights only, even where the format rounds activations too."
)
@click.option("--dtype", default="float32", show_default=True, help="Arithmetic: float32, bfloat16 or float16.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@json_option
def command(
    model: str,
    text: Path | None,
    window: int,
    max_windows: int | None,
    base: str | None,
    kl_windows: int | None,
    exact_activations: bool,
    dtype: str,
    device: str,
    as_json: bool,
) -> None:
    """Perplexity of MODEL, quantized or not: weights decoded, activations rounded as an engine would.

    \b
    quantkit eval demo
    quantkit eval demo-w4 --text my.txt --window 512 --json
    quantkit eval demo-w4 --base demo

    Protocol: text as it is, no special tokens, windows do not overlap, the first token of a window is not scored.
    """
    if kl_windows and not base:
        raise click.UsageError("--kl-windows compares with another model; name it with --base")
    activations = "exact" if exact_activations else "served"
    how: dict[str, Any] = {"dtype": dtype, "device": device, "activations": activations}
    perplexity, divergence = _measure(model, base, text, window, max_windows, kl_windows or 8, how)
    if as_json:
        compared = {"base": base, "divergence": divergence.to_dict()} if divergence else {}
        print_json({"model": model} | perplexity.to_dict() | how | compared)
        return
    click.echo(
        f"perplexity {perplexity.perplexity:.4f} ({perplexity.bits_per_byte:.4f} bits per byte) on {perplexity.text}: "
        f"{perplexity.windows} windows of {window} tokens, {dtype}, activations {'as ' * (not exact_activations)}"
        f"{activations}"
    )
    if divergence:
        click.echo(
            f"KL divergence {divergence.kl:.5f} nats per token from {base}, {divergence.top1_agreement:.2%} of first "
            f"choices the same: {divergence.windows} windows"
        )


def _measure(
    model: str,
    base: str | None,
    text: Path | None,
    window: int,
    max_windows: int | None,
    kl_windows: int,
    how: dict[str, Any],
) -> tuple[Perplexity, Divergence | None]:
    """`how`: keyword arguments of load_reference."""
    from quantkit.bundled import HELDOUT_TEXT
    from quantkit.eval.divergence import measure_divergence
    from quantkit.eval.perplexity import measure_perplexity
    from quantkit.reference import load_reference, load_tokenizer

    text = text or HELDOUT_TEXT
    with progress_bar("loading") as advance:
        loaded = load_reference(model, **how, on_tensor=advance)
    tokenizer = load_tokenizer(model)
    divergence = None
    if base:
        with progress_bar("loading base") as advance:
            base_model = load_reference(base, **how, on_tensor=advance)
        with progress_bar("KL windows") as advance:
            divergence = measure_divergence(
                base_model, loaded, tokenizer, text, window=window, max_windows=kl_windows, on_window=advance
            )
        del base_model
    with progress_bar("windows") as advance:
        perplexity = measure_perplexity(
            loaded, tokenizer, text, window=window, max_windows=max_windows, on_window=advance
        )
    return perplexity, divergence
