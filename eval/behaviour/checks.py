"""What one answer did: whether it loops, fits a schema, calls a tool. Nothing here knows about models or statistics."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from quantkit.runtime.server.tools.parsers import ToolParser
from quantkit.runtime.server.tools.syntaxes import SYNTAXES

LOOP_TOKENS = 8  # fewer in a row are a figure of speech, or the end of a table
LOOP_TIMES = 3
SHORTEST_LOOP = LOOP_TOKENS * LOOP_TIMES  # tokens of an answer in which one can show
_CODE_BLOCK = re.compile(r"```[a-zA-Z]*\n(?P<code>.*?)\n?```", re.DOTALL)


def repeats(tokens: Sequence[int]) -> bool:
    """Whether an answer ends with the same 8 tokens or more, three times in a row.

    Shorter loops count too, once they fill that much: 24 times the same token is 8 of them three times.
    """
    for size in range(LOOP_TOKENS, len(tokens) // LOOP_TIMES + 1):
        block = tokens[-size:]
        if all(tokens[-(turn + 1) * size : -turn * size] == block for turn in range(1, LOOP_TIMES)):
            return True
    return False


def is_json_of(text: str, schema: dict[str, Any]) -> bool:
    """Whether the whole answer, or the one code block that it consists of, is JSON that fits the schema."""
    text = text.strip()
    block = _CODE_BLOCK.fullmatch(text)
    try:
        return _fits(json.loads(block["code"] if block else text, parse_constant=_refuse_constant), schema)
    except (ValueError, RecursionError):
        return False


def calls_tools_rightly(text: str, tools: Sequence[dict[str, Any]], style: str) -> bool:
    """Whether an answer calls tools that were offered, every call with arguments that fit the tool's schema.

    `style` is how the model writes calls: see `style_of`.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    _, calls = ToolParser(SYNTAXES[style], schemas).parse(text)
    return bool(calls) and all(is_json_of(call.arguments, schemas[call.name]) for call in calls)


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from referencing import Registry

    return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))  # an empty one fetches nothing


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
