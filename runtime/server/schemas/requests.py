"""What a client may send: OpenAI's fields with OpenAI's ranges, and the extras that vLLM's clients know.

Types are strict ("1" is no number) and unknown fields are ignored, so that what /openapi.json says is what happens.
`null` means the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from quantkit.runtime.core.sampling_params import MOST_LOGPROBS
from quantkit.runtime.core.watermark import MOST_DELTA
from quantkit.runtime.server.schemas.messages import Message, Tool, ToolChoice

MOST_ANSWERS = 128
MOST_PROMPTS = 256
_LARGEST = 2**31 - 1  # of whole numbers that travel to the device
_SEED = 2**63

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=_LARGEST)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


class Strict(BaseModel):
    """How every value of a request is read."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredOutputs(Strict):
    """vLLM's newer name for structured output; exactly one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class WatermarkFields(Strict):
    """How strong a watermark is."""

    gamma: float | None = Field(None, ge=0.01, le=0.99, description="Share of green tokens; 0.25 if left out.")
    delta: float | None = Field(None, gt=0, le=MOST_DELTA, description="Added to their logits; 2 if left out.")


class SharedFields(Strict):
    """What chat and plain completions have in common."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out where there is one model.")
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_LARGEST)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[BiasKey, Bias] | None = None
    seed: int | None = Field(None, ge=-_SEED, le=_SEED - 1)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=_LARGEST)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-1000, le=1000, description="Lower goes first.")
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    watermark: bool | WatermarkFields | None = Field(None, description="Needs a server with watermark_key_file.")
    best_of: int | None = Field(None, ge=1, le=MOST_ANSWERS, description="Draw so many, give the likeliest n.")
    use_beam_search: bool | None = Field(None, description="Not supported: only null or false.")

    escalate: bool | Annotated[int, Field(ge=0, le=_LARGEST)] | None = Field(
        None, description="Of a virtual model of that policy: so many models after the first; true is 1."
    )

    @field_validator("use_beam_search")
    @classmethod
    def _no_beams(cls, wanted: bool | None) -> bool | None:
        if wanted:
            raise ValueError("not supported: answers are drawn one by one; best_of gives the likeliest of several")
        return wanted

    @property
    def answers(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def token_id_field(self) -> str | None:
        """A field that holds token ids, which are those of one model."""
        return "logit_bias" if self.logit_bias else "stop_token_ids" if self.stop_token_ids else None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(SharedFields):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=_LARGEST)
    max_completion_tokens: int | None = Field(None, ge=1, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SharedFields):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0, le=_LARGEST, description="16 if left out.")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    suffix: str | None = Field(None, max_length=0, description="Not supported: only null or an empty text.")

    @property
    def token_id_field(self) -> str | None:
        whole = isinstance(self.prompt, str) or isinstance(self.prompt[0], str)
        return super().token_id_field if whole else "prompt"

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, suffix: object) -> object:
        if isinstance(suffix, str) and suffix:
            raise ValueError("not supported: this server only continues texts")
        return suffix


class TokenizeText(Strict):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class TokenizeChat(Strict):
    """POST /tokenize with a conversation."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
