"""From the text of a recipe to plain values: strict YAML, and `KEY=VALUE` changes from the command line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from quantkit.errors import InputError


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, made strict: by itself it silently takes the last of two equal keys."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


# PyYAML speaks YAML 1.1, where 1e-3 is text and only 1.0e-3 a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str, where: str) -> Any:
    """YAML as plain values. Beside its own errors, PyYAML lets those of numbers and dates through."""
    try:
        return yaml.load(text, _Loader)
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
