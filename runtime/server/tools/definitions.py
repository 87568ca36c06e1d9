"""OpenAI's tools: checking what a request says about them, telling the model, and making it call them.

Tools are plain JSON as in the request: {"type": "function", "function": {"name", "description", "parameters"}}.
A model whose chat template knows tools is told by the template; others get a system text, and calls and results of
earlier turns as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.runtime.sampling.structured_output import JSON_STYLE, GuideSpec, check_guide
from quantkit.runtime.server.tools.parsers import template_text
from quantkit.runtime.server.tools.syntaxes import HERMES, NAME, SYNTAXES, Syntax

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
MOST_TOOLS = 128
MOST_PARALLEL_CALLS = 16  # in one answer; a weak model would not stop
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "if", "then", "else"}
_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

"""
_INSTRUCTIONS = {
    "hermes": "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "llama3": "To call functions, answer with nothing but a json object for each call, separated by `; `:\n"
    '{"name": <function-name>, "parameters": <args-json-object>}',
}


class ToolsError(InputError):
    """A field about tools is wrong; `param` is its path in the request."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


# What a request says.


def check_tools(tools: Any, tool_choice: Any = None) -> None:
    """Raises ToolsError for the first field that is wrong."""
    if tools is not None and not isinstance(tools, list):
        raise ToolsError("tools", f"is {_shown(tools)}, but must be a list")
    if len(tools or ()) > MOST_TOOLS:
        raise ToolsError("tools", f"has {len(tools or ())} entries, but must not have more than {MOST_TOOLS}")
    names: dict[str, int] = {}
    for index, tool in enumerate(tools or ()):
        name = _checked_name(tool, f"tools[{index}]")
        if name in names:
            first = f"tools[{names[name]}].function.name"
            raise ToolsError(f"tools[{index}].function.name", f"is '{name}', which is {first} already; rename one")
        names[name] = index
    _check_choice(tool_choice, names)


def _checked_name(tool: Any, path: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise ToolsError(f"{path}.type", "must be 'function'; no other tools are known")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ToolsError(f"{path}.function", f"is {_shown(function)}, but must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ToolsError(
            f"{path}.function.name", f"is {_shown(name)}, but must be 1 to 64 of the characters a-z A-Z 0-9 _ -"
        )
    if not isinstance(function.get("description") or "", str):
        raise ToolsError(f"{path}.function.description", f"is {_shown(function['description'])}, but must be a text")
    _check_schema(function.get("parameters"), f"{path}.function.parameters")
    return name


def _check_schema(schema: Any, path: str) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping):
        raise ToolsError(path, f"is {_shown(schema)}, but must be a JSON schema, which is an object")
    if schema.get("type", "object") != "object":
        raise ToolsError(f"{path}.type", f"is {_shown(schema['type'])}, but arguments are always an 'object'")


def _check_choice(choice: Any, names: Mapping[str, int]) -> None:
    if choice in (None, "none", "auto"):
        return
    if choice != "required" and (not isinstance(choice, Mapping) or choice.get("type") != "function"):
        named = '{"type": "function", "function": {"name": ...}}'
        raise ToolsError("tool_choice", f"is {_shown(choice)}, but must be 'none', 'auto', 'required' or {named}")
    if not names:
        raise ToolsError("tool_choice", "asks for a call, but there are no tools; give some or leave it out")
    if choice != "required":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in names:
            known = ", ".join(names)
            raise ToolsError("tool_choice.function.name", f"is {_shown(name)}, but the tools are: {known}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Telling the model.


def template_knows_tools(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the chat template itself tells the model about tools."""
    return "tools" in template_text(tokenizer)


def tool_system_text(tools: Sequence[Json], style: str) -> str:
    """What a model is told whose chat template knows nothing of tools."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return _INTRODUCTION.format(tools="\n".join(lines)) + _INSTRUCTIONS.get(style, _INSTRUCTIONS["hermes"])


def turns_with_tools(turns: Sequence[Json], tools: Sequence[Json], style: str) -> list[Json]:
    """Turns for a template that knows nothing of tools: what is about tools becomes text."""
    syntax = SYNTAXES.get(style, HERMES)
    told = [_as_text(turn, syntax) for turn in turns]
    text = tool_system_text(tools, style)
    if told and told[0]["role"] == "system":
        told[0] = told[0] | {"content": f"{told[0]['content']}\n\n{text}"}
        return told
    return [{"role": "system", "content": text}, *told]


def _as_text(turn: Json, syntax: Syntax) -> Json:
    content = turn.get("content") or ""
    if turn["role"] == "tool":  # models without the role read results as Qwen's and Hermes' templates write them
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not turn.get("tool_calls"):
        return {**turn, "content": content}
    written = []
    for call in turn["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append(syntax.write(call["function"]["name"], text))
    calls = syntax.between.join(written)
    kept = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**kept, "content": f"{content}\n{calls}" if content else calls}


# Making it call.


def guide_for(tools: Sequence[Json] | None, tool_choice: Any, parallel: bool, style: str) -> GuideSpec | None:
    """A grammar of nothing but calls, for a choice that asks for one: "required" or a named function.

    Exactly one call, or with `parallel` one or more; the arguments are valid for the tool's schema.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    if style not in SYNTAXES:
        raise ToolsError("tool_choice", "asks for a call, but this server runs without a tool parser")
    syntax = SYNTAXES[style]
    wanted = None if tool_choice == "required" else tool_choice["function"]["name"]
    rules = []
    for index, tool in enumerate(tools or ()):
        if wanted in (None, tool["function"]["name"]):
            schema = _argument_schema(tool["function"], f"tools[{index}].function.parameters")
            before, after = map(json.dumps, syntax.around_arguments(tool["function"]["name"]))
            rules.append(f"{before} %json {json.dumps(schema)} {after}")
    calls = "call"
    if parallel and wanted is None:
        calls += f" ({json.dumps(syntax.between)} call){{0,{MOST_PARALLEL_CALLS - 1}}}"
    lines = [f"start: {calls}", "call: " + " | ".join(f"call_{index}" for index in range(len(rules)))]
    return GuideSpec("grammar", "\n".join(lines + [f"call_{index}: {rule}" for index, rule in enumerate(rules)]))


def _argument_schema(function: Json, path: str) -> Json:
    """The schema of a tool's arguments, made to stand in a grammar."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if not _COMBINING & schema.keys():  # a model would invent arguments, which a function seldom takes
        schema.setdefault("additionalProperties", False)
    own = schema.get("x-guidance")
    schema["x-guidance"] = {**(own if isinstance(own, dict) else {}), **JSON_STYLE}
    try:
        check_guide(GuideSpec("json_schema", json.dumps(schema)))
    except InputError as error:
        raise ToolsError(path, f"must be a schema that can be enforced: {error}") from error
    return schema
