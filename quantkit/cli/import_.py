"""quantkit import"""

from __future__ import annotations

from typing import Any

import click

from quantkit.cli.common import json_option, output_option, overwrite_option, print_json, progress_bar
from quantkit.extras import require
from quantkit.wording import human_bytes


@click.command("import", short_help="Make a model folder from a GGUF file.")
@click.argument("file")
@output_option
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="bfloat16, float16 or float32: how weights are stored."
)
@overwrite_option
@json_option
def command(file: str, output: str, dtype: str, overwrite: bool, as_json: bool) -> None:
    """Make a Hugging Face folder from FILE, a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model.

    Weights are decoded, tokenizer and chat template come along. Precision that the file has lost does not come back.

    \b
    quantkit import SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2
    quantkit generate smollm2 "What is a list?" --chat
    """
    require("quantkit import", "gguf")
    from quantkit.gguf_import import import_gguf

    with progress_bar("importing") as advance:
        summary = import_gguf(file, output, dtype=dtype, overwrite=overwrite, on_tensor=advance)
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary)


def _print_summary(summary: dict[str, Any]) -> None:
    types = ", ".join(f"{count} x {name}" for name, count in summary["tensor_types"].items())
    chat = summary["chat_template"]
    lines = [
        f"architecture   {summary['architecture']}, {summary['parameters'] / 1e6:,.1f} million parameters",
        f"tokens         {summary['vocab_size']:,}, context {summary['context_length']:,}",
        f"chat template  {'yes' if chat else 'none in the file'}",
        f"tensors        {types}",
        f"written        {summary['output']}: {human_bytes(summary['bytes'])} as {summary['dtype']}",
        f'try            quantkit generate {summary["output"]} "What is a list?"{" --chat" if chat else ""}',
    ]
    click.echo("\n".join(lines))
