"""The command line and the recipes as Markdown, from click and from recipes/ themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import yaml

from quantkit.cli import cli

ROOT = Path(__file__).parents[2]


def command_reference() -> str:
    """Every command with its help text and a table of its options."""
    return "\n\n".join(_command(name, command) for name, command in leaves(cli))


def leaves(command: click.Command, name: str = "quantkit") -> Iterator[tuple[str, click.Command]]:
    """Commands that do something, by their whole names, in the order of `--help`."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None, each
        yield from leaves(found, f"{name} {each}")


def _command(name: str, command: click.Command) -> str:
    usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name=name)))
    rows = [_row(option) for option in command.params if isinstance(option, click.Option) and not option.hidden]
    table = ["| option | meaning |", "|---|---|", *rows] if rows else []
    parts = (f"## {name}", f"```text\n{name} {usage}\n```", help_text(command.help or ""), "\n".join(table))
    return "\n\n".join(part for part in parts if part)


def help_text(text: str) -> str:
    r"""Paragraphs; those that begin with \b keep their lines, as click prints them."""
    parts = []
    for part in re.split(r"\n{2,}", inspect.cleandoc(text)):
        if part.startswith("\b"):
            parts.append(f"```text\n{part[1:].strip(chr(10))}\n```")
        else:
            parts.append(_plain(part))
    return "\n\n".join(parts)


def _row(option: click.Option) -> str:
    names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" `{option.make_metavar(click.Context(click.Command('')))}`"
    meaning = _plain(option.help or "").replace("|", "\\|")
    shown = option.get_help_extra(click.Context(click.Command("")))
    extras = [f"default: {shown['default']}"] if shown.get("default") else []
    extras += ["required"] if shown.get("required") else []
    extras += [shown["range"]] if shown.get("range") else []
    value = value.replace("|", "\\|")
    return f"| {names}{value} | {meaning}{' (' + '; '.join(extras) + ')' if extras else ''} |"


def _plain(text: str) -> str:
    """Words in angle brackets or with stars are words."""
    return re.sub(r"([<>*])", r"\\\1", " ".join(text.split()))


def recipe_table() -> str:
    """The recipes that come with quantkit, with their summaries."""
    files = sorted((ROOT / "recipes").glob("*.yaml"))
    summaries = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))["summary"] for file in files}
    rows = [f"| `{name}` | {_plain(summary)} |" for name, summary in summaries.items()]
    return "\n".join(["| recipe | what it is |", "|---|---|", *rows])
