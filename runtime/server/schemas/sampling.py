"""From the fields of a request to what the engine takes: sampling parameters and a guide."""

from __future__ import annotations

import json
from typing import Any

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.watermark import DELTA, GAMMA, Watermark
from quantkit.runtime.sampling.structured_output import GuideSpec, check_guide
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SharedFields,
    WatermarkFields,
)

COMPLETION_TOKENS = 16  # OpenAI's default for plain completions
GREEDY_BELOW = 1e-4  # temperatures under which sampling is greedy but for rounding, and 1/temperature overflows
_SAME_NAME = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop",
              "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens")  # fmt: skip


def chat_params(request: ChatRequest, watermark_key: str | None = None) -> SamplingParams:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if request.best_of not in (None, request.answers):
        raise ApiError(400, "best_of must equal n in a chat; /v1/completions ranks answers", param="best_of")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, watermark_key, max_tokens=most, logprobs=logprobs)


def completion_params(request: CompletionRequest, watermark_key: str | None = None) -> SamplingParams:
    """A request for no token at all asks for one, which is thrown away: the prompt is scored on the way to it. `n` is
    how many answers are drawn: `best_of`, where it is more than those wanted."""
    drawn = request.best_of or request.answers
    if drawn < request.answers:
        raise ApiError(400, f"best_of is {drawn}, but must be at least n, which is {request.answers}", param="best_of")
    if drawn > request.answers and request.stream:
        raise ApiError(400, "best_of above n cannot be streamed: all answers must end first", param="best_of")
    if request.echo and request.stream and request.logprobs is not None:
        raise ApiError(400, "logprobs of an echoed prompt cannot be streamed; leave stream out", param="echo")
    most = COMPLETION_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
    scored = request.logprobs if request.echo else None
    logprobs = (request.logprobs or 0) if drawn > request.answers else request.logprobs
    found = _params(
        request, watermark_key, n=drawn, max_tokens=most, logprobs=logprobs, prompt_logprobs=scored
    )  # fmt: skip
    if drawn > request.answers and found.greedy:
        raise ApiError(400, "best_of above n needs a temperature above 0: greedy answers are alike", param="best_of")
    return found


def watermark_of(asked: bool | WatermarkFields | None, key: str | None) -> Watermark | None:
    """The watermark that a request asks for, with the key of this server."""
    if not asked:
        return None
    if key is None:
        message = "watermark: this server has no key for it; its operator sets watermark_key_file"
        raise ApiError(400, message, param="watermark", code="invalid_value")
    if asked is True:
        return Watermark(key)
    return Watermark(key, GAMMA if asked.gamma is None else asked.gamma, DELTA if asked.delta is None else asked.delta)


def _params(request: SharedFields, watermark_key: str | None, **others: Any) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        watermark=watermark_of(request.watermark, watermark_key),
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        include_stop=bool(request.include_stop_str_in_output),
        **{"n": request.answers} | given | others,
    )


def guide_of(request: SharedFields) -> GuideSpec | None:
    """The structure that the answer must have; at most one may be asked for. Takes milliseconds for a large schema."""
    asked = _asked_guides(request)
    if len(asked) > 1:
        names = " and ".join(asked)
        raise ApiError(400, f"{names} ask for structure together; give one of them", param=list(asked)[-1])
    for name, spec in asked.items():
        try:
            check_guide(spec)
        except InputError as error:
            raise ApiError(400, str(error), param=name, code="invalid_value") from error
        return spec
    return None


def _asked_guides(request: SharedFields) -> dict[str, GuideSpec]:
    found: dict[str, GuideSpec | None] = {
        "guided_json": _schema(request.guided_json),
        "guided_regex": _spec("regex", request.guided_regex),
        "guided_choice": _choice(request.guided_choice),
        "guided_grammar": _spec("grammar", request.guided_grammar),
    }
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        found["response_format"] = GuideSpec("json_object", "")
    elif isinstance(wanted, JsonSchemaFormat):
        found["response_format"] = _spec("json_schema", json.dumps(wanted.json_schema.schema_))
    if request.structured_outputs is not None:
        outputs = request.structured_outputs
        found["structured_outputs.json"] = _schema(outputs.json_)
        found["structured_outputs.regex"] = _spec("regex", outputs.regex)
        found["structured_outputs.choice"] = _choice(outputs.choice)
        found["structured_outputs.grammar"] = _spec("grammar", outputs.grammar)
    return {name: spec for name, spec in found.items() if spec is not None}


def _spec(kind: Any, text: str | None) -> GuideSpec | None:
    return None if text is None else GuideSpec(kind, text)


def _choice(choices: list[str] | None) -> GuideSpec | None:
    return None if choices is None else GuideSpec("choice", json.dumps(choices))


def _schema(schema: dict[str, Any] | str | None) -> GuideSpec | None:
    if schema is None:
        return None
    return GuideSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
