"""The prompts on which behaviour is measured: a file of JSON lines, ours or the user's.

    {"messages": [{"role": "user", "content": "Name three colours."}]}
    {"messages": [...], "schema": {...}}     asks for JSON; the answer should fit this JSON schema
    {"messages": [...], "tools": [...]}      offers tools; the answer should call one

`messages` and `tools` are those of a chat request to `quantkit serve`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from quantkit.errors import InputError, StorageError, did_you_mean
from quantkit.runtime.sampling.structured_output import GuideSpec, check_guide
from quantkit.runtime.server.models.prompts import as_turn
from quantkit.runtime.server.schemas.messages import Message
from quantkit.runtime.server.tools.definitions import check_tools

BUNDLED_PROMPTS = Path(__file__).parent / "prompts.jsonl"
Json = dict[str, Any]
Kind = Literal["chat", "json", "tools"]
_KEYS = ("messages", "schema", "tools")
_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


@dataclass(frozen=True, eq=False)
class BehaviourPrompt:
    """One line of the file."""

    line: int
    turns: Sequence[Json]  # the messages as chat templates take them
    schema: Json | None = None
    tools: Sequence[Json] = ()

    @property
    def kind(self) -> Kind:
        """What the prompt asks for."""
        if self.tools:
            return "tools"
        return "chat" if self.schema is None else "json"


def read_prompts(file: str | Path = BUNDLED_PROMPTS) -> list[BehaviourPrompt]:
    """Refuses a file with a wrong line: says which one, and what is wrong with it."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot read the prompts in {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"{file} is no UTF-8 text; prompts are JSON lines in UTF-8") from error
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(number, line))
            except InputError as error:
                raise InputError(f"line {number} of {file}: {error}") from error
    if not prompts:
        raise InputError(f'{file} has no prompts; a line is {{"messages": [{{"role": "user", "content": "..."}}]}}')
    return prompts


def _prompt(number: int, line: str) -> BehaviourPrompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is no JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InputError(f"this is a JSON {type(entry).__name__}, but must be an object with 'messages'")
    for key in entry:
        if key not in _KEYS:
            raise InputError(f"there is no key '{key}'; {did_you_mean(key, _KEYS)}")
    if entry.get("schema") is not None and entry.get("tools"):
        raise InputError("'schema' and 'tools' ask for two kinds of answer; leave one out")
    if any(0xD800 <= ord(char) < 0xE000 for char in json.dumps(entry, ensure_ascii=False)):
        raise InputError("a text has half a surrogate pair, which is no character")
    return BehaviourPrompt(number, _turns(entry), _schema(entry.get("schema")), _tools(entry.get("tools")))


def _turns(entry: Json) -> list[Json]:
    if "messages" not in entry:
        raise InputError("'messages' is missing")
    try:
        messages = _MESSAGES.validate_python(entry["messages"])
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise InputError(f"'messages{where}' is wrong: {first['msg']}") from error
    if not messages or messages[-1].role not in ("user", "tool"):
        raise InputError("'messages' must end with a message of the user or of a tool, to which the model answers")
    return [as_turn(message) for message in messages]


def _schema(schema: Any) -> Json | None:
    """Refuses what cannot be enforced too: the answers under a guide are one of the measures."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]

    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise InputError(f"'schema' is {schema!r}, but must be a JSON schema, which is an object")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise InputError(f"'schema' is no JSON schema: {error.message}") from error
    check_guide(GuideSpec("json_schema", json.dumps(schema)))
    return schema


def _tools(tools: Any) -> list[Json]:
    check_tools(tools)
    for index, tool in enumerate(tools or ()):
        try:
            _schema(tool["function"].get("parameters"))
        except InputError as error:
            raise InputError(f"tools[{index}].function.parameters: {error}") from error
    return list(tools or ())
