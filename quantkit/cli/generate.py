"""quantkit generate"""

from __future__ import annotations

import click

from quantkit.cli.common import json_option, print_json, progress_bar


@click.command("generate", short_help="Continue a prompt, or answer it with --chat.")
@click.argument("model")
@click.argument("prompt")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(min=1), help="New tokens at most.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0.0), help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, help="For sampling.")
@click.option("--chat", is_flag=True, help="Put the prompt through the tokenizer's chat template.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@json_option
def command(
    model: str, prompt: str, max_tokens: int, temperature: float, seed: int, chat: bool, device: str, as_json: bool
) -> None:
    """Continue PROMPT with MODEL, quantized or not. Only the new text goes to stdout.

    \b
    quantkit generate demo "The function returns"
    quantkit generate demo-nf4 "What is a list?" --chat --max-tokens 80
    """
    from quantkit.reference import generate_text, load_reference, load_tokenizer

    with progress_bar("loading") as advance:
        loaded = load_reference(model, device=device, on_tensor=advance)
    text = generate_text(
        loaded,
        load_tokenizer(model),
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
    )
    if as_json:
        print_json({"model": model, "prompt": prompt, "text": text})
    else:
        click.echo(text)
