"""quantkit chat"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.engine_options import engine_options, load_llm, sampling_options, sampling_params
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.output.prompts import Message

HELP = "/reset begins anew, /exit (or Ctrl-D) leaves, Ctrl-C ends an answer"


@click.command("chat", short_help="Talk to a model in the terminal.")
@click.argument("model")
@click.option("--system", metavar="TEXT", help="A first message that says how to answer.")
@sampling_options
@engine_options
def command(model: str, system: str | None, **options: Any) -> None:
    """Talk to MODEL in the terminal. The conversation stays in the cache, so a turn costs only its new tokens.

    \b
    quantkit chat demo
    quantkit chat org/model --system "Answer in one sentence." --temperature 0.7 --max-tokens 500
    """
    params = sampling_params(options)
    llm: LLM = load_llm(model, options)
    llm.encode_chat([{"role": "user", "content": "x"}])  # refuses a model without a chat template now
    click.echo(HELP, err=True)
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while (line := _read()) is not None:
        if line == "/reset":
            messages = list(opening)
        elif line == "/exit":
            break
        elif line.startswith("/"):
            click.echo(f"unknown command {line}; {HELP}", err=True)
        elif line:
            messages = _turn(llm, messages, line, params)


def _read() -> str | None:
    """A line of the user; None at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        click.echo(err=True)
        return None


def _turn(llm: LLM, messages: list[Message], line: str, params: Any) -> list[Message]:
    """The conversation with this question and its answer; as it was where the question cannot be answered."""
    asked: list[Message] = [*messages, {"role": "user", "content": line}]
    text = ""
    try:
        for delta in llm.stream(llm.encode_chat(asked), params):
            click.echo(delta.text, nl=False)
            text += delta.text
    except KeyboardInterrupt:
        click.echo(" [ended]", nl=False)
    except InputError as error:
        click.echo(f"{error}; /reset begins anew", err=True)
        return messages
    click.echo()
    return [*asked, {"role": "assistant", "content": text}]
