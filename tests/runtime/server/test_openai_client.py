"""The official client against a real server: what OpenAI promises, with a real model behind it."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

QUESTION: Any = [{"role": "user", "content": "What is a list?"}]
PROMPT = "The function returns"


@pytest.fixture(scope="module")
def client(live_server: Any) -> Iterator[openai.OpenAI]:
    with live_server.openai() as made:
        yield made


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(**{"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0} | options)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "demo", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**defaults | options)


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=12)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "demo"
    assert answer.system_fingerprint
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 5
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_takes_parts_and_long_conversations(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]}]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content
    turns = [
        {"role": "developer", "content": "Answer shortly."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    as_system = [turns[0] | {"role": "system"}, *turns[1:]]
    first, second = chat(client, messages=turns), chat(client, messages=as_system)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


def test_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    options = {"max_tokens": 64, "extra_body": {"ignore_eos": True}}
    whole = chat(client, **options)
    chunks = list(chat(client, **options, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len(deltas) > 4  # it came in pieces, of several tokens where the client is slow


def test_completion_and_its_stream(client: openai.OpenAI) -> None:
    whole = complete(client)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_second_request_finds_its_prompt_in_the_cache(client: openai.OpenAI) -> None:
    prompt = "A cache keeps what was computed before. " * 8
    complete(client, prompt)
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens >= 16


def test_every_form_of_a_prompt(client: openai.OpenAI, live_server: Any) -> None:
    ids = live_server.ask("POST", "/tokenize", {"prompt": PROMPT}).json["tokens"]
    wanted = complete(client).choices[0].text
    other = complete(client, "In the year").choices[0].text
    for prompt in (ids, [PROMPT], [ids]):
        assert complete(client, prompt).choices[0].text == wanted
    many = complete(client, [PROMPT, "In the year", PROMPT], n=2)
    assert [choice.text for choice in many.choices] == [wanted, wanted, other, other, wanted, wanted]
    assert [choice.index for choice in many.choices] == list(range(6))
    texts = [""] * 2
    for chunk in complete(client, [PROMPT, "In the year"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [wanted, other]


def test_echo(client: openai.OpenAI, live_server: Any) -> None:
    wanted = PROMPT + complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == wanted
    ids = live_server.ask("POST", "/tokenize", {"prompt": PROMPT}).json["tokens"]
    assert complete(client, ids, echo=True).choices[0].text == wanted
    assert "".join(chunk.choices[0].text for chunk in complete(client, echo=True, stream=True)) == wanted


def test_a_prompt_is_scored_without_new_tokens(client: openai.OpenAI) -> None:
    scored = complete(client, echo=True, max_tokens=0, logprobs=2)
    choice = scored.choices[0]
    assert choice.text == PROMPT
    assert scored.usage.completion_tokens == 0
    assert choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]


def test_n_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    first = chat(client, n=3, temperature=1.0, seed=7, max_tokens=16)
    again = chat(client, n=3, temperature=1.0, seed=7, max_tokens=16)
    other = chat(client, n=3, temperature=1.0, seed=8, max_tokens=16)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    assert [choice.message.content for choice in other.choices] != texts
    streamed = [""] * 3
    for chunk in chat(client, n=3, temperature=1.0, seed=7, max_tokens=16, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-5)  # greedy
        assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1 + 1e-5
    streamed = list(chat(client, logprobs=True, stream=True))
    found = [token for chunk in streamed if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in found] == [token.token for token in content]
    assert all(token.top_logprobs == [] for token in found)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(len(row) == 2 for row in choice.logprobs.top_logprobs)
    for token, value, row in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert row[token] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer(client: openai.OpenAI, live_server: Any, stream: bool) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    stop = whole[10:14]
    wanted = whole[: whole.index(stop)]
    answer = complete(client, max_tokens=400, stop=[stop, "never"], stream=stream)
    if stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].text == wanted
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 100
    live_server.wait_until(lambda stats: stats.running == 0)


def test_other_ways_to_end(client: openai.OpenAI, live_server: Any) -> None:
    whole = complete(client).choices[0].text
    stop = whole[5:8]
    with_it = complete(client, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0].text
    assert with_it == whole[: whole.index(stop) + 3]
    first = live_server.ask("POST", "/tokenize", {"prompt": whole, "add_special_tokens": False}).json["tokens"][0]
    ended = complete(client, extra_body={"stop_token_ids": [first]})
    assert ended.choices[0].text == ""
    assert ended.choices[0].finish_reason == "stop"
    unending = complete(client, max_tokens=40, extra_body={"ignore_eos": True})
    assert unending.usage.completion_tokens == 40
    longer = chat(client, max_tokens=None, max_completion_tokens=3)
    assert longer.usage.completion_tokens <= 3


def test_sampling_fields_reach_the_engine(client: openai.OpenAI) -> None:
    greedy = complete(client).choices[0].text
    for options in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert complete(client, temperature=1.5, seed=3, extra_body=options).choices[0].text == greedy
    banned = complete(client, logprobs=0, max_tokens=1)
    token = banned.choices[0].text
    ids = {text: token_id for token_id, text in enumerate(_vocabulary(client))}
    assert complete(client, max_tokens=1, logit_bias={str(ids[token]): -100}).choices[0].text != token
    for options in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
        assert complete(client, max_tokens=60, extra_body=options).choices[0].text
    assert complete(client, temperature=1e-12).choices[0].text == greedy
    assert complete(client, temperature=100.0).choices[0].finish_reason


def _vocabulary(client: openai.OpenAI) -> list[str]:
    from quantkit.runtime.output.tokenizer import load_tokenizer
    from quantkit.sources import model_folder

    tokenizer = load_tokenizer(model_folder("demo"))
    assert tokenizer is not None
    return [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}}]


def test_structured_output(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for options in ({"response_format": wanted}, {"extra_body": {"structured_outputs": {"json": SCHEMA}}}):
        found = json.loads(chat(client, max_tokens=200, temperature=1.0, seed=1, **options).choices[0].message.content)
        assert set(found) == {"name", "size"}
    found = chat(client, max_tokens=20, extra_body={"guided_regex": "[ab]{3}-[0-9]{2}"}).choices[0].message.content
    assert re.fullmatch("[ab]{3}-[0-9]{2}", found)
    for options in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert complete(client, n=2, extra_body=options).choices[1].text in ("yes", "no")
    assert complete(client, extra_body={"guided_grammar": 'start: "x" "y"'}).choices[0].text == "xy"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "parallel_tool_calls": False}
    answer = chat(client, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "find"
    assert set(json.loads(call.function.arguments)) == {"name", "size"}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    deltas = [chunk.choices[0] for chunk in chat(client, stream=True, **options)]
    streamed = [piece for choice in deltas for piece in choice.delta.tool_calls or []]
    assert streamed[0].function.name == "find"
    assert "".join(piece.function.arguments for piece in streamed) == call.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    results = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
    ]
    assert chat(client, messages=results, tools=TOOLS).choices[0].finish_reason


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_served_names(start_server: Any) -> None:
    server = start_server(served_model_name=["org/name", "other"])
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == ["org/name", "other"]
        assert client.models.retrieve("org/name").id == "org/name"
        assert complete(client, model="other").model == "other"
        with pytest.raises(openai.NotFoundError):
            complete(client, model="demo")


async def _many(url: str) -> list[Any]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return await asyncio.gather(*(
            client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0) for _ in range(12)
        ))  # fmt: skip


def test_many_at_once(client: openai.OpenAI, live_server: Any) -> None:
    import asyncio

    wanted = complete(client).choices[0].text
    assert {answer.choices[0].text for answer in asyncio.run(_many(live_server.base_url))} == {wanted}


def test_tokenize_round_trip(live_server: Any) -> None:
    text = "A naïve 🙂 text\n with spaces"
    found = live_server.ask("POST", "/tokenize", {"prompt": text}).json
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    assert live_server.ask("POST", "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}
    turns = live_server.ask("POST", "/tokenize", {"messages": QUESTION}).json["tokens"]
    shown = live_server.ask("POST", "/detokenize", {"tokens": turns}).json["prompt"]
    assert shown == "<|user|>\nWhat is a list?<|end|>\n<|assistant|>\n"


def test_operation(live_server: Any) -> None:
    assert live_server.ask("GET", "/health").json == {"status": "ok"}
    assert live_server.ask("GET", "/ready").status == 200
    assert live_server.ask("GET", "/version").json["version"]
    metrics = live_server.ask("GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b'finished_reason="length"' in metrics.content
    page = live_server.ask("GET", "/")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert live_server.ask("GET", "/page/status").json["info"]["model"] == "demo"
    assert "/v1/chat/completions" in live_server.ask("GET", "/openapi.json").json["paths"]
