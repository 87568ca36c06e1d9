"""The conversation in a request: messages, tools, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_CONFIG = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(BaseModel):
    model_config = _CONFIG
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class _WithContent(BaseModel):
    model_config = _CONFIG

    @field_validator("content", mode="before", check_fields=False)
    @classmethod
    def _only_text(cls, content: object) -> object:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"a part of type '{kind[:40]}' cannot be read; this model takes text only")
        return content


class SystemMessage(_WithContent):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_WithContent):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(BaseModel):
    model_config = _CONFIG
    name: str
    arguments: str


class MadeCall(BaseModel):
    """A call that the model made in an earlier turn."""

    model_config = _CONFIG
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_WithContent):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[MadeCall] | None = None


class ToolMessage(_WithContent):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(BaseModel):
    model_config = _CONFIG
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = _CONFIG
    type: Literal["function"]
    function: Function


class ChosenFunction(BaseModel):
    model_config = _CONFIG
    name: FunctionName


class NamedChoice(BaseModel):
    model_config = _CONFIG
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def text_of(content: Content | None) -> str:
    """Parts are joined as they are."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
