"""What a client gets, for /openapi.json: the shapes that `routes/chat_writer.py` and `routes/completions.py` write."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(BaseModel):
    cached_tokens: int


class PredictionTokens(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens | None = None  # only where the server speculates


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChosenLogprob]
    refusal: None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Answer):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(_Answer):
    """The continuations of prompts, n for each in turn."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    policy: Literal["cheapest", "escalate"] | None = None  # of a virtual model
    members: list[str] | None = None  # of a virtual model, in the order in which they are asked


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizedText(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok"]
    models: dict[str, Literal["ready", "down"]] | None = None  # only where the server has several


class Ready(BaseModel):
    status: Literal["ready"]
    models: dict[str, Literal["ready", "down"]] | None = None  # only where the server has several
    rehearsing: str | None = None  # what is prepared next between requests; not there when all is done
    left: int | None = None  # parts of that


class Version(BaseModel):
    version: str


def answer_or_stream(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that gives one object, or events when `stream` is true."""
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, "description": "The answer; events when `stream` is true", "content": events}}
