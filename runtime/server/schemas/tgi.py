"""What a client of text-generation-inference may send, what it gets, and what its fields mean for the sampler.

Names, defaults and ranges are TGI's. Unlike OpenAI's clients, these are told of every field that is not known here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from quantkit.runtime.core.sampling_params import MOST_LOGPROBS, SamplingParams
from quantkit.runtime.sampling.structured_output import GuideSpec, check_guide
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.schemas.requests import MOST_ANSWERS, StopText, Strict
from quantkit.runtime.server.schemas.sampling import GREEDY_BELOW, watermark_of

NEW_TOKENS = 100  # where a request does not say
MOST_STOPS = 16
_LARGEST = 2**31 - 1
Finish = Literal["length", "eos_token", "stop_sequence"]


class _Known(Strict, extra="forbid"):
    """A value whose every field must be known."""


class Grammar(_Known):
    """What the answer must be: JSON of a schema, or a text of a regular expression."""

    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str

    @property
    def guide(self) -> GuideSpec:
        if self.type == "regex":
            if not isinstance(self.value, str):
                raise ApiError(400, "a regex must be text", param="parameters.grammar")
            return GuideSpec("regex", self.value)
        schema = self.value.get("schema", {}) if self.type == "json_schema" and isinstance(self.value, dict) else None
        wanted = self.value if schema is None else schema
        return GuideSpec("json_schema", wanted if isinstance(wanted, str) else json.dumps(wanted))


class TgiParameters(_Known):
    """`parameters` of a request."""

    max_new_tokens: int | None = Field(None, ge=1, le=_LARGEST, description="100 if left out.")
    do_sample: bool | None = Field(None, description="Else greedy, unless temperature, top_k or top_p ask for more.")
    temperature: float | None = Field(None, gt=0, le=100)
    top_k: int | None = Field(None, ge=1, le=_LARGEST)
    top_p: float | None = Field(None, gt=0, le=1)
    typical_p: float | None = Field(None, description="Not supported: only null.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: list[StopText] | None = Field(None, max_length=MOST_STOPS)
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = Field(None, description="Log-probabilities of the prompt, in the details.")
    top_n_tokens: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MOST_ANSWERS, description="Draw so many, give the likeliest.")
    truncate: int | None = Field(None, ge=1, le=_LARGEST, description="Keep so many tokens of the end of the prompt.")
    watermark: bool | None = Field(None, description="Needs a server with watermark_key_file.")
    grammar: Grammar | None = None
    adapter_id: str | None = Field(None, description="Not supported: only null.")

    @field_validator("typical_p", "adapter_id")
    @classmethod
    def _nothing(cls, given: object) -> object:
        if given is not None:
            raise ValueError("not supported by this server; leave it out")
        return given

    @property
    def samples(self) -> bool:
        """As TGI: also where a field only makes sense for sampling."""
        changed = self.temperature not in (None, 1.0) or self.top_k is not None or self.top_p not in (None, 1.0)
        return bool(self.do_sample) or changed

    @property
    def drawn(self) -> int:
        return self.best_of or 1

    @property
    def likeliest(self) -> int:
        """How many other tokens are listed for each."""
        return self.top_n_tokens or 0


class TgiRequest(_Known):
    """POST /generate and /generate_stream"""

    inputs: str
    parameters: TgiParameters = TgiParameters.model_validate({})

    @field_validator("parameters", mode="before")
    @classmethod
    def _none_is_left_out(cls, given: object) -> object:
        return {} if given is None else given


class TgiEitherRequest(TgiRequest):
    """POST /"""

    stream: bool | None = None


def tgi_params(given: TgiParameters, watermark_key: str | None, *, stream: bool) -> SamplingParams:
    if given.drawn > 1 and stream:
        raise ApiError(400, "best_of above 1 cannot be streamed: all answers must end first", param="best_of")
    if given.drawn > 1 and not given.samples:
        raise ApiError(400, "best_of above 1 needs sampling: set do_sample to true", param="best_of")
    if given.decoder_input_details and stream:
        raise ApiError(400, "decoder_input_details cannot be streamed", param="decoder_input_details")
    temperature = (given.temperature or 1.0) if given.samples else 0.0
    scored = stream or given.details or given.drawn > 1
    return SamplingParams(
        n=given.drawn,
        max_tokens=given.max_new_tokens or NEW_TOKENS,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=given.top_k or 0,
        top_p=1.0 if given.top_p is None else given.top_p,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        stop=given.stop or (),
        include_stop=True,
        seed=given.seed,
        logprobs=given.likeliest if scored else None,
        prompt_logprobs=0 if given.details and given.decoder_input_details else None,
        watermark=watermark_of(given.watermark, watermark_key),
    )


def tgi_guide(given: TgiParameters) -> GuideSpec | None:
    """Takes milliseconds for a large schema."""
    if given.grammar is None:
        return None
    check_guide(given.grammar.guide)
    return given.grammar.guide


class PrefillToken(BaseModel):
    id: int
    text: str
    logprob: float | None


class TgiToken(BaseModel):
    id: int
    text: str
    logprob: float
    special: bool


class _Ended(BaseModel):
    finish_reason: Finish
    generated_tokens: int
    seed: int | None


class Sequence(_Ended):
    """One of best_of answers."""

    generated_text: str
    prefill: list[PrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | None = None


class Details(_Ended):
    prefill: list[PrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | None = None
    best_of_sequences: list[Sequence] | None = None


class Generated(BaseModel):
    """The answer, whole."""

    generated_text: str
    details: Details | None = None


class StreamDetails(_Ended):
    input_length: int


class StreamEvent(BaseModel):
    """A token of a stream; the last one has the whole text."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | None = None
    generated_text: str | None
    details: StreamDetails | None


class Info(BaseModel):
    """What is served, and its limits."""

    model_id: str
    model_sha: None = None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: Literal["text-generation"] = "text-generation"
    max_concurrent_requests: int
    max_best_of: Annotated[int, Field(le=MOST_ANSWERS)] = MOST_ANSWERS
    max_stop_sequences: int = MOST_STOPS
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_client_batch_size: int = 1
    validation_workers: int
    router: Literal["quantkit"] = "quantkit"
    version: str
    sha: None = None
    docker_label: None = None
