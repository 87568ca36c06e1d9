"""What a server that speculates tells about it: usage for clients, counters, the numbers of the page."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.engine_process.pending import PendingRequest
from quantkit.runtime.server.models.answer_stream import AnswerStream
from quantkit.sources import model_folder

QUESTION: Any = [{"role": "user", "content": "What is a list?"}]
PROMPT = "one two three one two three one two three one two"
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], noisy_draft: Path) -> Any:
    return start_server(speculative=f"draft={noisy_draft},k=3,adaptive=off")


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def details(answer: Any) -> tuple[int, int]:
    """(accepted, rejected), as the official client reads them."""
    found = answer.usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def test_usage_says_what_was_guessed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, extra_body={"ignore_eos": True}, **GREEDY)
    accepted, rejected = details(answer)
    assert answer.usage.completion_tokens == 24
    assert 0 < accepted < 24
    assert rejected > 0
    whole = client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **GREEDY)
    assert sum(details(whole)) > 0
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24  # what was rejected is nobody's token


def test_streams_and_several_answers_say_it_too(client: openai.OpenAI) -> None:
    options: dict[str, Any] = GREEDY | {"extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(messages=QUESTION, **options)
    last = list(
        client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **options
        )
    )[-1]
    assert details(last) == details(whole)
    one = client.completions.create(prompt=PROMPT, **options)
    streamed = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **options)
    )[-1]
    assert details(streamed) == details(one)
    twice = client.completions.create(prompt=[PROMPT, PROMPT], **options)
    assert details(twice) == tuple(2 * count for count in details(one))


def test_a_request_that_nothing_is_guessed_for_has_zeros(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY | {"max_tokens": 1})
    assert details(answer) == (0, 0)


def test_a_stop_string_keeps_the_counts(client: openai.OpenAI) -> None:
    """The server ends such an answer, not the engine: what was guessed must be known before."""
    prompt = "The function returns"
    text = client.completions.create(prompt=prompt, **GREEDY).choices[0].text
    late = next(end for end in range(len(text) // 2, len(text)) if text.find(text[end - 5 : end]) == end - 5)
    answer = client.completions.create(prompt=prompt, stop=text[late - 5 : late], **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    accepted, rejected = details(answer)
    assert accepted < answer.usage.completion_tokens
    assert accepted + rejected > 0


def test_without_speculation_the_field_is_absent(live_server: Any) -> None:
    with live_server.openai() as client:
        answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.usage.completion_tokens_details is None
    body = json.dumps({"prompt": PROMPT, **GREEDY}).encode()
    assert "completion_tokens_details" not in live_server.ask("POST", "/v1/completions", body).json["usage"]
    live = live_server.ask("GET", "/page/status").json
    assert live["info"]["speculates"] is False
    assert "acceptance_percent" not in live["live"]
    assert b"spec_decode" not in live_server.ask("GET", "/metrics").content


def test_metrics_and_page_follow_the_engine(server: Any, client: openai.OpenAI) -> None:
    client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **GREEDY)
    server.wait_until(lambda stats: stats.running == 0 and stats.guessed_tokens > 0)
    stats = server.stats
    text = server.ask("GET", "/metrics").content.decode()
    found = {
        sample.name.removeprefix("quantkit:spec_decode_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        "num_drafts_total": stats.draft_steps,
        "num_draft_tokens_total": stats.guessed_tokens,
        "num_accepted_tokens_total": stats.accepted_tokens,
        "saved_seconds": pytest.approx(stats.saved_seconds),
    }
    assert 0 < stats.accepted_tokens < stats.guessed_tokens
    status = server.ask("GET", "/page/status").json
    assert status["info"]["speculates"] is True
    live = status["live"]
    assert live["acceptance_percent"] == round(100 * stats.accepted_tokens / stats.guessed_tokens, 1)
    assert live["tokens_per_step"] == round(1 + stats.accepted_tokens / stats.draft_steps, 2)


@pytest.mark.parametrize(("guesses", "told"), [((8, 8), (2, 6)), ((8, 1), (1, 7)), ((0, 0), (0, 0))])
def test_guesses_behind_the_end_of_an_answer_are_rejected(guesses: tuple[int, int], told: tuple[int, int]) -> None:
    """Three tokens, of which the first is never a guess: at most two can have been guessed right."""
    tokenizer = load_tokenizer(model_folder("demo"))
    assert tokenizer is not None
    pending = PendingRequest(_Nobody(), 0, 1)
    answers = AnswerStream(pending, [5], SamplingParams(), tokenizer, (), _Nobody(), 0.0)  # type: ignore[arg-type]
    for token in (10, 11, 12):
        answers._take(TokenOutput(0, 0, token))
    pending.guesses[0] = guesses
    assert answers.predicted == told


class _Nobody:
    """Takes every call of a client or of metrics, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None
