"""Commands as the pages show them: all can be parsed, and what is said of all of them is true."""

import importlib
import re
from collections.abc import Iterator

import click
import pytest

from pages import PAGES, ROOT, bare_commands, commands, quantkit_arguments
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


def test_the_reference_of_the_site_has_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/tools/command_pages.py writes it when the site is built."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    written = importlib.import_module("command_pages").command_reference()
    sections = dict(re.findall(r"^## quantkit (.+?)\n(.*?)(?=^## |\Z)", written, re.DOTALL | re.MULTILINE))
    found = dict(leaves(cli))
    assert set(sections) == set(found)
    for name, command in found.items():
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert len(options) == len(re.findall(r"^\| `-", sections[name], re.MULTILINE)), name
        assert all(f"`{flag}`" in sections[name] for option in options for flag in option.opts), name


def test_the_reference_of_the_site_has_every_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    written = importlib.import_module("command_pages").recipe_table()
    assert set(re.findall(r"^\| `(.+?)` \|", written, re.MULTILINE)) == {
        file.stem for file in (ROOT / "recipes").glob("*.yaml")
    }


def test_a_wrong_option_would_be_seen() -> None:
    assert len(SHOWN) > 90
    with pytest.raises(click.NoSuchOption):
        test_commands_of_the_pages_have_options_that_exist("", "quantkit plan llama-3.1-8b --tensor-paralel 2")
