"""`quantkit.LLM`: the public face of the engine."""

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
