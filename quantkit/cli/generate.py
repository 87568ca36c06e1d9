"""quantkit generate"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import json_option, print_json
from quantkit.cli.engine_options import engine_options, load_llm, sampling_options, sampling_params

if TYPE_CHECKING:
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.output.answers import Generation


@click.command("generate", short_help="Continue a prompt, or answer it with --chat.")
@click.argument("model")
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Put the prompt through the tokenizer's chat template.")
@click.option("-n", default=1, show_default=True, type=click.IntRange(min=1), help="How many answers, with --json.")
@click.option("--logprobs", type=click.IntRange(0, 20), metavar="N", help="Alternatives of each token, with --json.")
@click.option("--watermark-key-file", metavar="FILE", help="File with the secret whose watermark the answers get.")
@sampling_options
@engine_options
@json_option
def command(
    model: str,
    prompt: str,
    chat: bool,
    n: int,
    logprobs: int | None,
    watermark_key_file: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue PROMPT with MODEL, quantized or not. Only the new text goes to stdout, as it comes.

    \b
    quantkit generate demo "The function returns"
    quantkit generate demo-nf4 "What is a list?" --chat --max-tokens 80
    quantkit generate org/model "Once" --temperature 0.8 --top-p 0.95 --seed 7 -n 3 --json
    quantkit generate model-w4 "2 + 2 =" --device cuda --stop "." --kv-dtype fp8
    quantkit generate demo "The function returns" --speculative draft=demo-draft,k=4
    quantkit generate demo "The function returns" --temperature 1 --max-tokens 200 --watermark-key-file secret.txt
    """
    from dataclasses import replace

    from quantkit.errors import InputError
    from quantkit.runtime.core.watermark import Watermark
    from quantkit.runtime.server.config_file import read_watermark_key

    if not as_json and (n > 1 or logprobs is not None):
        raise InputError("-n and --logprobs need --json: the text alone has no room for them")
    params = replace(sampling_params(options), n=n, logprobs=logprobs)
    if watermark_key_file is not None:
        params = replace(params, watermark=Watermark(read_watermark_key(watermark_key_file)))
    llm: LLM = load_llm(model, options)
    ids = llm.encode_chat([{"role": "user", "content": prompt}]) if chat else llm.encode(prompt)
    if as_json:
        found = llm.generate([ids], params)[0]
        print_json(_as_json(model, prompt, found) | _guesses(llm))
        return
    for delta in llm.stream(ids, params):
        click.echo(delta.text, nl=False)
    click.echo()
    if llm.engine.speculation.on:
        click.echo(f"speculation: {_describe_guesses(llm)}", err=True)


def _guesses(llm: LLM) -> dict[str, Any]:
    """This process has asked nothing else, so the engine's counters are those of the answers."""
    found = llm.engine.speculation
    if not found.on:
        return {}
    return {"speculation": {"steps": found.steps, "guessed": found.guessed, "accepted": found.accepted}}


def _describe_guesses(llm: LLM) -> str:
    engine, found = llm.engine, llm.engine.speculation
    right = f"{100 * found.accepted / found.guessed:.0f} % of guesses right" if found.guessed else "nothing was guessed"
    return f"{engine.generated} tokens in {engine.steps} steps, {right}"


def _as_json(model: str, prompt: str, found: Generation) -> dict[str, Any]:
    answers = [
        {
            "index": answer.index,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **({} if answer.logprobs is None else {"logprobs": answer.logprobs, "top_logprobs": answer.top_logprobs}),
        }
        for answer in found.answers
    ]
    return {
        "model": model,
        "prompt": prompt,
        "text": found.text,
        "prompt_tokens": len(found.prompt_token_ids),
        "answers": answers,
    }
