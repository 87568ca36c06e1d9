"""`quantkit.LLM`: the public face of the engine."""

from dataclasses import replace

import pytest

from quantkit import LLM, SamplingParams
from quantkit.errors import InputError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_context=256)


def test_texts_and_token_ids(llm: LLM) -> None:
    text = "The function returns"
    params = SamplingParams(max_tokens=8)
    by_text = llm.generate(text, params)[0]
    by_ids = llm.generate(llm.encode(text), params)[0]
    assert by_text.text == by_ids.text
    assert by_text.prompt == text
    assert by_ids.prompt is None
    together = llm.generate([text, llm.encode("In the year"), text], [params, SamplingParams(max_tokens=3), params])
    assert [len(one.answers[0].token_ids) for one in together] == [8, 3, 8]
    assert together[0].text == together[2].text == by_text.text
    assert llm.generate([]) == []


def test_a_stream_is_the_same_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    whole = llm.generate("A list of", params)[0]
    deltas = list(llm.stream("A list of", params))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.token for delta in deltas] == whole.answers[0].token_ids
    assert [delta.finished for delta in deltas] == [None] * 11 + ["length"]


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("A list of", SamplingParams(max_tokens=100))
    next(stream)
    assert llm.engine.unfinished == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.unfinished == 0
    assert llm.engine.scheduler.pool.free == llm.engine.scheduler.pool.usable


def test_a_stop_string_ends_one_of_several_answers(llm: LLM) -> None:
    """At once: the engine computes no more tokens of it, and all of the others."""
    params = SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=4, ignore_eos=True)
    whole = [answer.text for answer in llm.generate("A list of", params)[0].answers]
    ends = (whole[1][at : at + 5] for at in range(10, 60))
    stop = next(text for text in ends if text not in whole[0] + whole[2])
    before = llm.engine.generated
    answers = llm.generate("A list of", replace(params, stop=stop))[0].answers
    assert [answer.text for answer in answers] == [whole[0], whole[1].split(stop)[0], whole[2]]
    assert [answer.finish_reason for answer in answers] == ["length", "stop", "length"]
    assert answers[1].stop_reason == stop
    tokens = [len(answer.token_ids) for answer in answers]
    assert tokens[1] < 30
    assert llm.engine.generated - before == sum(tokens) == 80 + tokens[1]


def test_a_stream_beside_generate(llm: LLM) -> None:
    """Who asks for a step gets the tokens of others too, and must not lose them."""
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    stream = llm.stream("A list of", params)
    begun = [next(stream) for _ in range(3)]
    other = llm.stream("In the year", params)
    begun_beside = [next(other)]
    beside = llm.generate("The function returns", params)[0]
    outputs, others = [*begun, *stream], [*begun_beside, *other]
    for prompt, found in (("A list of", outputs), ("In the year", others)):
        alone = llm.generate(prompt, params)[0]
        assert [output.token for output in found] == alone.answers[0].token_ids
        assert "".join(output.text for output in found) == alone.text
        assert found[-1].finished == alone.answers[0].finish_reason
    assert beside == replace(llm.generate("The function returns", params)[0], cached_tokens=beside.cached_tokens)
    assert llm.engine.unfinished == 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is a list?"}]
    answer = llm.chat(messages, SamplingParams(max_tokens=60))
    assert answer.answers[0].finish_reason == "stop"
    assert "<|" not in answer.text


def test_progress_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["One", "Two"], SamplingParams(max_tokens=4), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "tokens/s" in shown.err


def test_a_wrong_number_of_parameters(llm: LLM) -> None:
    with pytest.raises(InputError, match="2 prompts, but 1 sampling parameters"):
        llm.generate(["One", "Two"], [SamplingParams()])
