"""Commands as the pages show them: all can be parsed, and what is said of all of them is true."""

from collections.abc import Iterator

import click
import pytest

from pages import PAGES, bare_commands, commands, quantkit_arguments
from quantkit.cli import cli

WITHOUT_JSON = {"chat", "serve"}  # they talk until somebody ends them; a server's log is JSON anyway
SHOWN = [(page, command) for page, command, _ in commands() if command.startswith("quantkit ")]
SHOWN = sorted({*SHOWN, *bare_commands()})


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Commands that do something, by their whole names."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None
        yield from leaves(found, f"{name} {each}".strip())


def options_of(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def test_all_commands_but_those_that_talk_have_json() -> None:
    found = dict(leaves(cli))
    assert len(found) > 15
    assert {name for name, command in found.items() if "--json" not in options_of(command)} == WITHOUT_JSON
    assert "all but `chat` and `serve`, which talk, have `--json`" in PAGES["docs/reference/command-line.md"]


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_commands_of_the_pages_have_options_that_exist(page: str, line: str) -> None:
    """Options, kinds of values and numbers of arguments; nothing runs, so models, files and GPUs need not be there."""
    command: click.Command = cli
    arguments = ["cpu" if argument == "cuda" else argument for argument in quantkit_arguments(line)]
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"{page}: {line}"
        command = found
    command.make_context(line, arguments)


def test_a_wrong_option_would_be_seen() -> None:
    assert len(SHOWN) > 90
    with pytest.raises(click.NoSuchOption):
        test_commands_of_the_pages_have_options_that_exist("", "quantkit plan llama-3.1-8b --tensor-paralel 2")
