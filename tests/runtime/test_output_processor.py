"""Tokens of an engine become text, stop strings end single answers, and the engine is told about those alone."""

from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.output.output_processor import OutputProcessor, TextOutput
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.sources import model_folder

TEXT = "The function returns a list of words, and größer ones too."
EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(model_folder("demo"))


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> list[int]:
    found: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert EOS not in found
    return found


def process(processor: OutputProcessor, *outputs: TokenOutput) -> list[TextOutput]:
    found = [processor.process(output) for output in outputs]
    return [output for output in found if output is not None]


def text_of(outputs: list[TextOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_a_stop_string_ends_one_answer_in_the_engine(tokenizer: Any, ids: list[int]) -> None:
    aborted: list[int] = []
    params = SamplingParams(n=2, stop="list", max_tokens=None)
    processor = OutputProcessor(tokenizer, [5], params, [EOS], aborted.append)
    stopped = process(processor, *(TokenOutput(3, 1, token) for token in ids))
    assert text_of(stopped) == "The function returns a "
    assert (stopped[-1].finished, stopped[-1].stop_reason, stopped[-1].request) == ("stop", "list", 3)
    assert len(stopped) < len(ids)  # what came later is none of the answer's
    assert aborted == [1]
    assert not processor.finished
    other = process(
        processor, *(TokenOutput(3, 0, token) for token in ids[:3]), TokenOutput(3, 0, EOS, finished="stop")
    )
    assert text_of(other) == tokenizer.decode(ids[:3])
    assert (other[-1].token, other[-1].finished, other[-1].stop_reason) == (EOS, "stop", None)
    assert processor.finished
    assert aborted == [1]  # the engine has ended the other one itself


def test_a_stop_string_in_the_last_token(tokenizer: Any, ids: list[int]) -> None:
    """It counts more than the length, and the engine has nothing left to end."""
    aborted: list[int] = []
    processor = OutputProcessor(tokenizer, [5], SamplingParams(stop="too.", include_stop=True), [EOS], aborted.append)
    outputs = [TokenOutput(0, 0, token) for token in ids[:-1]] + [TokenOutput(0, 0, ids[-1], finished="length")]
    found = process(processor, *outputs)
    assert text_of(found) == TEXT
    assert (found[-1].finished, found[-1].stop_reason) == ("stop", "too.")
    assert aborted == []


@pytest.mark.parametrize("finished", ["stop", "error"])
def test_which_last_tokens_have_a_text(finished: Any, tokenizer: Any, ids: list[int]) -> None:
    """That of a guide that is finished has one. One that the guide refused, and an end token of the request, do not."""
    params = SamplingParams(stop_token_ids=[ids[3]])
    processor = OutputProcessor(tokenizer, [5], params, [EOS], lambda index: None)
    found = process(processor, TokenOutput(0, 0, ids[0]), TokenOutput(0, 0, ids[1], finished=finished))
    assert text_of(found) == tokenizer.decode(ids[: 2 if finished == "stop" else 1])
    assert found[-1].finished == finished
    ended = OutputProcessor(tokenizer, [5], params, [EOS], lambda index: None)
    assert ended.end_tokens == {EOS, ids[3]}
    found = process(ended, TokenOutput(0, 0, ids[3], -0.5, [(1, -0.5)], "stop", ids[3]))
    assert (text_of(found), found[0].stop_reason, found[0].logprob, found[0].top) == ("", ids[3], -0.5, [(1, -0.5)])


def test_without_a_tokenizer() -> None:
    processor = OutputProcessor(None, [5], SamplingParams(ignore_eos=True), [EOS], lambda index: None)
    assert processor.end_tokens == frozenset()
    found = process(processor, TokenOutput(0, 0, 7), TokenOutput(0, 0, EOS, finished="length"))
    assert [(output.token, output.text) for output in found] == [(7, ""), (EOS, "")]
    assert processor.finished
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        OutputProcessor(None, [5], SamplingParams(stop="x"), [EOS], lambda index: None)
