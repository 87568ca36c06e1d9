"""Sampling parameters: every field is checked when they are made, and a refusal names the field and what is allowed."""

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams

INT64 = 2**63

# Field -> values at the ends of what is allowed, values just outside, and the words that say so.
WHOLE_NUMBERS: dict[str, tuple[list[int], list[int], str]] = {
    "n": ([1, 128, 16384], [0, -1, 16385], "a whole number from 1 to 16384"),
    "max_tokens": ([1, 10**9], [0, -1], "a whole number of at least 1 or None"),
    "min_tokens": ([0, 64], [-1], "a whole number of at least 0"),
    "top_k": ([-1, 0, 1, 10**9], [-2], "a whole number of at least -1"),
    "seed": ([-INT64, -1, 0, INT64 - 1], [-INT64 - 1, INT64], f"from {-INT64} to {INT64 - 1} or None"),
    "logprobs": ([0, 20], [-1, 21], "a whole number from 0 to 20 or None"),
    "prompt_logprobs": ([0, 20], [-1, 21], "a whole number from 0 to 20 or None"),
}
NUMBERS: dict[str, tuple[list[float], list[float], str]] = {
    "temperature": ([0, 0.7, 1000], [-1e-9], "a finite number of at least 0"),
    "top_p": ([1e-9, 1], [0, 1.001], "a finite number above 0 and at most 1"),
    "min_p": ([0, 1], [-1e-9, 1.001], "a finite number from 0 to 1"),
    "repetition_penalty": ([1e-9, 1, 50], [0, -1], "a finite number above 0"),
    "presence_penalty": ([-2, 2], [-2.001, 2.001], "a finite number from -2 to 2"),
    "frequency_penalty": ([-2, 2], [-2.001, 2.001], "a finite number from -2 to 2"),
}
FLAGS = ["ignore_eos", "include_stop", "skip_special_tokens"]
OPTIONAL = ["max_tokens", "seed", "logprobs", "prompt_logprobs"]


def refusal(**fields: Any) -> str:
    """The message with which these fields are refused."""
    with pytest.raises(InputError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", [*WHOLE_NUMBERS, *NUMBERS])
def test_numbers_are_taken_up_to_their_ends_and_not_beyond(name: str) -> None:
    inside, outside, words = (WHOLE_NUMBERS | NUMBERS)[name]
    for value in inside:
        assert getattr(SamplingParams(**{name: value}), name) == (value if name != "top_k" else max(value, 0))
    for value in outside:
        message = refusal(**{name: value})
        assert message.startswith(f"{name} is {value!r}, but must be ")
        assert message.endswith(words)


@pytest.mark.parametrize("name", [*WHOLE_NUMBERS, *NUMBERS])
@pytest.mark.parametrize("value", [True, False, "1", [1], math.nan, math.inf, -math.inf], ids=repr)
def test_numbers_of_other_types_are_refused(name: str, value: object) -> None:
    assert f"{name} is {value!r}" in refusal(**{name: value})


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers_are_not_floats(name: str) -> None:
    assert f"{name} is 1.0" in refusal(**{name: 1.0})


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_every_float_are_refused(name: str) -> None:
    assert name in refusal(**{name: 10**400})


@pytest.mark.parametrize("name", [*WHOLE_NUMBERS, *NUMBERS, *FLAGS, "logit_bias", "stop", "stop_token_ids"])
def test_none_is_taken_only_where_it_means_something(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        assert f"{name} is None" in refusal(**{name: None})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "yes"])
def test_flags_are_true_or_false(name: str, value: object) -> None:
    assert refusal(**{name: value}) == f"{name} is {value!r}, but must be true or false"
    assert getattr(SamplingParams(**{name: True}), name) is True


def test_min_tokens_may_reach_max_tokens_but_not_exceed_it() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    message = refusal(min_tokens=6, max_tokens=5)
    assert "min_tokens is 6" in message
    assert "max_tokens, which is 5" in message


def test_top_k_minus_one_means_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_whole_numbers_become_floats_where_numbers_stand() -> None:
    params = SamplingParams(temperature=1, logit_bias={3: 5})
    assert isinstance(params.temperature, float)
    assert isinstance(params.logit_bias[3], float)


def test_several_greedy_continuations_are_allowed() -> None:
    assert SamplingParams(n=3, temperature=0).n == 3


def test_one_stop_text_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_empty_stop_texts_are_refused(stop: object) -> None:
    message = refusal(stop=stop)
    assert f"stop is {stop!r}" in message
    assert "leave it out" in message


@pytest.mark.parametrize("stop", [5, [5], ["a", None], b"ab", {"a": 1}])
def test_stop_must_be_texts(stop: object) -> None:
    assert refusal(stop=stop) == f"stop is {stop!r}, but must be a text or a list of texts"


@pytest.mark.parametrize("ids", [5, "12", b"12", {1: 2}])
def test_stop_token_ids_must_be_a_list(ids: object) -> None:
    assert refusal(stop_token_ids=ids) == f"stop_token_ids is {ids!r}, but must be a list of token ids"


@pytest.mark.parametrize("token_id", [-1, True, 1.0, "1", None])
def test_token_ids_are_whole_numbers_from_zero(token_id: object) -> None:
    words = f"is {token_id!r}, but must be a whole number of at least 0"
    assert refusal(stop_token_ids=[3, token_id]) == f"a token id in stop_token_ids {words}"
    assert refusal(logit_bias={token_id: 1.0}) == f"a token id in logit_bias {words}"


@pytest.mark.parametrize("value", [-100.5, 100.5, math.nan, True, "1", None], ids=repr)
def test_biases_are_within_a_hundred(value: object) -> None:
    assert SamplingParams(logit_bias={7: -100, 8: 100}).logit_bias == {7: -100.0, 8: 100.0}
    assert refusal(logit_bias={7: value}) == f"logit_bias[7] is {value!r}, but must be a finite number from -100 to 100"


def test_bias_must_be_a_mapping() -> None:
    assert "logit_bias is [(1, 2)], but must map token ids to numbers" in refusal(logit_bias=[(1, 2)])


def test_later_changes_of_what_was_given_change_nothing() -> None:
    bias, stop, ids = {1: 1.0}, ["a"], [4]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[2] = math.nan
    stop.append("")
    ids.append(-1)
    assert params == SamplingParams(logit_bias={1: 1.0}, stop=["a"], stop_token_ids=[4])


@given(temperature=st.floats(0, 1e300))
def test_only_temperature_zero_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy == (temperature == 0.0)


@pytest.mark.parametrize(
    ("fields", "penalized", "shapes"),
    [
        ({}, False, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "stop_token_ids": [1]}, False, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"repetition_penalty": 0.9}, True, True),
        ({"presence_penalty": -0.1}, True, True),
        ({"frequency_penalty": 0.1}, True, True),
        ({"logit_bias": {1: 0.0}}, False, True),
        ({"min_tokens": 1}, False, True),
    ],
)
def test_what_changes_the_logits(fields: dict[str, Any], penalized: bool, shapes: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.penalized, params.shapes_logits) == (penalized, shapes)


@pytest.mark.parametrize("fields", [{"logit_bias": {3: 1.0, 10: 1.0}}, {"stop_token_ids": [3, 10]}])
def test_token_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.check_vocabulary(11)
    with pytest.raises(InputError, match=f"{next(iter(fields))} names token 10, .* from 0 to 9"):
        params.check_vocabulary(10)


def test_params_are_values() -> None:
    """They can be compared, hashed, copied with a change (checked again), and sent to another process."""
    params = SamplingParams(logit_bias={5: 1.0}, stop="x", seed=3)
    assert {params: 1}[SamplingParams(logit_bias={5: 1.0}, stop=("x",), seed=3)] == 1
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert dataclasses.replace(params, seed=4) != params
    with pytest.raises(InputError, match="top_p is 2"):
        dataclasses.replace(params, top_p=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5  # type: ignore[misc]
