"""quantkit eval"""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.cli.common import json_option, print_json, progress_bar


@click.command("eval", short_help="Measure perplexity on held-out text.")
@click.argument("model")
@click.option("--text", type=Path, metavar="FILE", help="A UTF-8 text; default: the held-out text that ships.")
@click.option("--window", default=1024, show_default=True, metavar="N", help="Tokens per window.")
@click.option("--max-windows", type=click.IntRange(min=1), metavar="N", help="Stop after N windows; default: all.")
@click.option("--dtype", default="float32", show_default=True, help="Arithmetic: float32, bfloat16 or float16.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@json_option
def command(
    model: str, text: Path | None, window: int, max_windows: int | None, dtype: str, device: str, as_json: bool
) -> None:
    """Perplexity of MODEL, quantized or not, computed with its decoded weights.

    \b
    quantkit eval demo
    quantkit eval demo-w4 --text my.txt --window 512 --json

    Protocol: text as it is, no special tokens, windows do not overlap, the first token of a window is not scored.
    """
    from quantkit.bundled import HELDOUT_TEXT
    from quantkit.eval.perplexity import measure_perplexity
    from quantkit.reference import load_reference, load_tokenizer

    with progress_bar("loading") as advance:
        loaded = load_reference(model, dtype, device, on_tensor=advance)
    with progress_bar("windows") as advance:
        result = measure_perplexity(
            loaded,
            load_tokenizer(model),
            text or HELDOUT_TEXT,
            window=window,
            max_windows=max_windows,
            on_window=advance,
        )
    if as_json:
        print_json({"model": model} | result.to_dict())
        return
    click.echo(
        f"perplexity {result.perplexity:.4f} ({result.bits_per_byte:.4f} bits per byte) on {result.text}: "
        f"{result.windows} windows of {result.window} tokens, {dtype}"
    )
