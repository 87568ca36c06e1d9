"""What a task says about the answers it wants, in the engine's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.core.sampling_params import SamplingParams

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_KNOWN = {*_LENGTHS, *_SAMPLING, "until", "do_sample"}


def generation_settings(
    given: Mapping[str, Any], tokenizer: Any, default_length: int
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Sampling parameters of a task's generation_kwargs, and the texts at which its answers are cut.

    Greedy unless a temperature is given. Beside the task's own stops, the model's last token is one, as in lm-eval.
    """
    unknown = sorted(name for name, value in given.items() if name not in _KNOWN and value is not None)
    if unknown:
        raise InputError(
            f"generation_kwargs has '{unknown[0]}', which the engine lacks; {did_you_mean(unknown[0], _KNOWN)}"
        )
    until = given.get("until") or ()
    stops = [text for text in ([until] if isinstance(until, str) else until) if text]
    last = tokenizer.decode(tokenizer.eos_token_id, skip_special_tokens=False)
    stops += [last] if last not in stops else []
    ends = {text: token for text in stops if (token := _special_token(text, tokenizer)) is not None}
    sampling = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    if given.get("do_sample") is False:
        sampling = {name: value for name, value in sampling.items() if name == "repetition_penalty"}
    params = SamplingParams(
        max_tokens=int(next((given[name] for name in _LENGTHS if given.get(name) is not None), default_length)),
        stop=[text for text in stops if text not in ends],
        stop_token_ids=list(ends.values()),  # a special token has no text that could be looked for
        seed=0,
        **sampling,
    )
    return params, tuple(stops)


def answer_text(text: str, stops: tuple[str, ...]) -> str:
    """An answer up to the first of its stops."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def _special_token(text: str, tokenizer: Any) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.all_special_ids else None
