"""What one request asks of the sampler: a frozen value whose fields are all checked when it is made.

Names and ranges follow OpenAI's and vLLM's. Sequences and mappings are copied, so that a caller who changes them later
changes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from quantkit.errors import InputError
from quantkit.runtime.core.watermark import Watermark

MOST_LOGPROBS = 20
_ALL_TOKENS = 2**31 - 1  # more than any vocabulary has


class _Range(NamedTuple):
    """The allowed values of a number, both ends included unless `open_low`."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low}" if self.open_low else f"of at least {self.low}"
        return f"above {self.low} and at most {self.high}" if self.open_low else f"from {self.low} to {self.high}"


_WHOLE_NUMBERS = {
    "n": _Range(1, 16384),
    "max_tokens": _Range(1),
    "min_tokens": _Range(0),
    "top_k": _Range(-1),
    "seed": _Range(-(2**63), 2**63 - 1),
    "logprobs": _Range(0, MOST_LOGPROBS),
    "prompt_logprobs": _Range(0, MOST_LOGPROBS),
}
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = {
    "temperature": _Range(0),
    "top_p": _Range(0, 1, open_low=True),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, open_low=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
}
_FLAGS = ("ignore_eos", "include_stop", "skip_special_tokens")
_BIAS = _Range(-100, 100)
_TOKEN_ID = _Range(0)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt; the defaults give 64 greedy tokens."""

    n: int = 1  # how many continuations
    max_tokens: int | None = 64  # None: as many as the context allows
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: all tokens; -1 means the same
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None: the engine picks one
    stop: Sequence[str] = ()  # one text or several; kept as a tuple
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # whether the text ends with the stop string that was met
    logprobs: int | None = None  # alternatives beside each chosen token; 0: the chosen one only
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    watermark: Watermark | None = None  # None: the answer gets none

    def __post_init__(self) -> None:
        for name, allowed in _WHOLE_NUMBERS.items():
            _check_whole(name, getattr(self, name), allowed, optional=name in _OPTIONAL)
        for name, allowed in _NUMBERS.items():
            self._keep(name, _checked_number(name, getattr(self, name), allowed))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}, but must be true or false")
        self._keep("top_k", min(max(self.top_k, 0), _ALL_TOKENS))
        self._keep("logit_bias", _checked_bias(self.logit_bias))
        self._keep("stop", _checked_stop(self.stop))
        self._keep("stop_token_ids", _checked_token_ids("stop_token_ids", self.stop_token_ids))
        if self.watermark is not None and not isinstance(self.watermark, Watermark):
            raise InputError(f"watermark is {self.watermark!r}, but must be a quantkit.Watermark or None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens is {self.min_tokens}, but must not exceed max_tokens, which is {self.max_tokens}; "
                "lower the one or raise the other"
            )

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time, so that nothing is random."""
        return self.temperature == 0

    @cached_property
    def penalized(self) -> bool:
        """Whether tokens that were there before count differently."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def shapes_logits(self) -> bool:
        """Whether the logits change before a token is chosen, even a greedy one."""
        return self.penalized or bool(self.logit_bias) or self.min_tokens > 0 or self.watermark is not None

    def end_tokens(self, eos: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end an answer, for a model whose own are `eos`."""
        return tuple({*(() if self.ignore_eos else eos), *self.stop_token_ids})

    def check_vocabulary(self, size: int) -> None:
        """Raises InputError for a token id that a model with this many tokens does not have."""
        for name, token_ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token_id for token_id in token_ids if token_id >= size]
            if outside:
                raise InputError(
                    f"{name} names token {outside[0]}, but this model's tokens go from 0 to {size - 1}; "
                    "take the ids from this model's tokenizer"
                )


def _check_whole(name: str, value: object, allowed: _Range, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not allowed.holds(value):
        raise InputError(f"{name} is {value!r}, but must be a whole number {allowed}{' or None' if optional else ''}")


def _checked_number(name: str, value: object, allowed: _Range) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value) and allowed.holds(value):
        return float(value)
    raise InputError(f"{name} is {value!r}, but must be a finite number {allowed}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias is {bias!r}, but must map token ids to numbers {_BIAS}, such as {{42: -100}}")
    _checked_token_ids("logit_bias", tuple(bias))
    return {token_id: _checked_number(f"logit_bias[{token_id}]", value, _BIAS) for token_id, value in bias.items()}


def _checked_stop(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"stop is {stop!r}, but must be a text or a list of texts")
    if "" in texts:
        raise InputError(f"stop is {stop!r}, but an empty text would stop everything at once; leave it out")
    return tuple(texts)


def _checked_token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise InputError(f"{name} is {token_ids!r}, but must be a list of token ids")
    for token_id in token_ids:
        _check_whole(f"a token id in {name}", token_id, _TOKEN_ID)
    return tuple(token_ids)
