"""From the text of a recipe to plain values: strict YAML, and `KEY=VALUE` changes from the command line."""

from __future__ import annotations

from typing import Any

import yaml

from quantkit.errors import InputError
from quantkit.strict_yaml import StrictLoader


def parse(text: str, where: str) -> Any:
    """YAML as plain values. Beside its own errors, PyYAML lets those of numbers and dates through."""
    try:
        return yaml.load(text, StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{where}: {line}not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


def key_of(change: str) -> str:
    return change.partition("=")[0].strip()


def changed(contents: dict[str, Any], change: str) -> dict[str, Any]:
    """The contents with one `KEY=VALUE` applied; the value is YAML."""
    names = key_of(change).split(".")
    if "=" not in change or not all(names):
        raise InputError(f"change '{change}' is not of the form KEY=VALUE, such as format.bits=3")
    return _replaced(contents, names, parse(change.partition("=")[2], f"change '{change}'"), change)


def _replaced(holder: dict[str, Any], names: list[str], value: Any, change: str) -> dict[str, Any]:
    first, *rest = names
    if rest:
        inner = holder.get(first, {})
        if not isinstance(inner, dict):
            raise InputError(f"change '{change}': '{first}' has no keys inside; give it whole, as in {first}=VALUE")
        value = _replaced(inner, rest, value, change)
    return {**holder, first: value}
