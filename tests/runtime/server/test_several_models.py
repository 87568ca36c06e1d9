"""Three models in one `quantkit serve`: each answers as it does alone, and one that dies takes nobody with it."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import quantkit
from quantkit.runtime.core.sampling_params import SamplingParams

pytestmark = [pytest.mark.xdist_group("engine-process"), pytest.mark.long]
NAMES = ("large", "small", "packed")
PROMPTS = ("The function returns", "A list is", "def main():", "The first step")
TOKENS = 12
CONTEXT = 128


@pytest.fixture(scope="module")
def packed(quantized_draft: Callable[..., Path]) -> Path:
    return quantized_draft("rtn-w3g128")  # so few bits that it says something else


@pytest.fixture(scope="module")
def served(
    serving: Callable[..., AbstractContextManager[Any]], packed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    config = tmp_path_factory.mktemp("several") / "server.yaml"
    config.write_text(
        "models:\n"
        "  large: demo\n"
        "  small: {model: demo-draft, max_context: 96, kv_tokens: 400}\n"
        f"  packed: {{model: {packed}, speculative: 'draft=demo-draft,k=3,adaptive=off'}}\n"
        f"max_context: {CONTEXT}\nmax_sequences: 4\ncache_split: large=3,small=1,packed=1\n"
        "virtual_models: {auto: {policy: cheapest, members: [large, small]}}\n"
        "device: cpu\nport: 0\nvllm_metric_names: true\n"
    )
    with serving("--config", str(config)) as started:
        yield started


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=served.key, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone(packed: Path) -> dict[tuple[str, str], str]:
    """(name, prompt) -> what the model says when there is no server at all."""
    found = {}
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    for name, model in zip(NAMES, ("demo", "demo-draft", str(packed)), strict=True):
        answers = quantkit.LLM(model, device="cpu", max_context=96).generate(list(PROMPTS), params)
        found |= {(name, prompt): answer.text for prompt, answer in zip(PROMPTS, answers, strict=True)}
    return found


def say(client: openai.OpenAI, model: str, prompt: str, *, stream: bool = False) -> str:
    asked: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    if not stream:
        answer = client.completions.create(**asked)
        assert answer.model == model
        return answer.choices[0].text
    chunks = list(client.completions.create(**asked, stream=True))
    assert {chunk.model for chunk in chunks} == {model}
    return "".join(chunk.choices[0].text for chunk in chunks)


def samples(served: Any, name: str) -> dict[str, float]:
    """Of a metric without further labels, by model."""
    text = served.ask("GET", "/metrics")[2]
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family stands there twice"
    assert all("model_name" in sample.labels for family in families for sample in family.samples)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels["model_name"]: sample.value for sample in found}


def test_the_plan_is_printed_first_and_obeyed(served: Any, client: openai.OpenAI) -> None:
    assert f"quantkit serves {', '.join(NAMES)} at http" in served.wait_for("serves", served.out)
    head, *rows, usable, _ = served.out
    assert head.split()[0] == "model"
    assert usable.startswith("may be used: ")
    assert [row.split()[0] for row in rows] == list(NAMES)
    tokens = {row.split()[0]: int(row.split()[-4].replace(",", "")) for row in rows}
    assert tokens["small"] == 400
    assert {name: 16 * pages for name, pages in samples(served, "quantkit:kv_pages_total").items()} == tokens
    limits = {model.id: model.max_model_len for model in client.models.list()}  # type: ignore[attr-defined]
    assert limits == {"large": CONTEXT, "small": 96, "packed": CONTEXT, "auto": CONTEXT}
    assert len(served.children) == 3


def test_everybody_at_once_gets_the_answers_of_the_model_that_was_asked(
    client: openai.OpenAI, alone: dict[tuple[str, str], str]
) -> None:
    assert len(set(alone.values())) == len(alone), "answers that differ tell who gave them"
    jobs = [(name, prompt, stream) for stream in (False, True) for prompt in PROMPTS for name in NAMES]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda job: say(client, job[0], job[1], stream=job[2]), jobs))
    for (name, prompt, _), answer in zip(jobs, answers, strict=True):
        assert answer == alone[name, prompt], f"{name}: {prompt}"


def test_a_virtual_model_of_the_file_goes_by_weights(
    served: Any, client: openai.OpenAI, alone: dict[tuple[str, str], str]
) -> None:
    told = [event["message"] for event in served.events() if "virtual" in event["message"]]
    assert told == ["auto is virtual: cheapest of small, large, asked in this order"]
    answer = client.completions.create(model="auto", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0)
    assert (answer.model, answer.choices[0].text) == ("small", alone["small", PROMPTS[0]])


def test_a_name_that_is_not_there(served: Any, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other' here; this server has: large, small, packed"):
        say(client, "other", "Hello")
    status, _, text = served.ask("POST", "/v1/completions", {"prompt": "Hello"})
    assert (status, json.loads(text)["error"]["param"]) == (400, "model")
    assert "this server has several: large, small, packed" in text
    assert served.ask("GET", "/ready?model=other")[0] == 404


def test_the_tokenizer_and_the_page_are_those_of_the_model(served: Any) -> None:
    tokens = [json.loads(served.ask("POST", "/tokenize", {"model": name, "prompt": "A list"})[2]) for name in NAMES]
    assert [found["max_model_len"] for found in tokens] == [CONTEXT, 96, CONTEXT]
    shown = [json.loads(served.ask("GET", f"/page/status?model={name}")[2]) for name in NAMES]
    assert [found["info"]["model"] for found in shown] == list(NAMES)
    assert [found["info"]["speculates"] for found in shown] == [False, False, True]
    assert all(found["models"] == list(NAMES) for found in shown)
    assert len({found["info"]["weights_bytes"] for found in shown}) == 3


def test_every_metric_says_whose_it_is(served: Any, client: openai.OpenAI) -> None:
    names = ("quantkit:requests_total", "vllm:generation_tokens_total", "quantkit:e2e_request_latency_seconds_count")
    before = [samples(served, name) for name in names]
    say(client, "small", PROMPTS[0])
    end = time.monotonic() + 10  # the engine tells its numbers every 100 ms
    while (found := [samples(served, name) for name in names])[1] == before[1]:
        assert time.monotonic() < end
        time.sleep(0.05)
    grown = [{name: now[name] - then[name] for name in NAMES} for now, then in zip(found, before, strict=True)]
    assert [row["small"] for row in grown] == [1, TOKENS, 1]
    assert all(row[name] == 0 for row in grown for name in ("large", "packed"))
    assert set(samples(served, "quantkit:spec_decode_num_drafts_total")) == {"packed"}
    refused = samples(served, "quantkit:request_refused_total")
    served.ask("POST", "/v1/completions", {"model": "packed", "prompt": "Hello", "top_p": 7})
    served.ask("POST", "/v1/completions", {"model": "packed", "prompt": "x " * 500})
    served.ask("POST", "/v1/completions", {"model": "packed", "prompt": "Hello"}, key="not-a-known-key-at-all")
    now = samples(served, "quantkit:request_refused_total")
    assert now["packed"] == refused.get("packed", 0) + 1, "only the second came as far as its model"
    assert "large" not in now


def test_one_that_dies_leaves_the_others_alone(
    served: Any, client: openai.OpenAI, alone: dict[tuple[str, str], str]
) -> None:
    stream = client.completions.create(
        model="large", prompt="A", max_tokens=CONTEXT - 8, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(served.children[0], signal.SIGKILL)  # engines are started in the order of the models
    with pytest.raises(openai.APIError, match="engine") as seen:
        list(stream)
    assert seen.value.code == "engine_unavailable"
    refused = served.ask("POST", "/v1/completions", {"model": "large", "prompt": "A"})
    assert refused[0] == 503
    assert refused[1]["Retry-After"]
    with pytest.raises(openai.InternalServerError, match="not ready"):
        say(client, "large", PROMPTS[0])
    states = json.loads(served.ask("GET", "/health")[2])
    assert states == {"status": "ok", "models": {"large": "down", "small": "ready", "packed": "ready"}}
    assert [served.ask("GET", f"/ready{query}")[0] for query in ("", "?model=large", "?model=small")] == [200, 503, 200]
    assert samples(served, "quantkit:engine_ready") == {"large": 0, "small": 1, "packed": 1}
    for name in ("small", "packed"):
        assert say(client, name, PROMPTS[0]) == alone[name, PROMPTS[0]]
    end = time.monotonic() + 60
    while served.ask("GET", "/ready?model=large")[0] != 200:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert say(client, "large", PROMPTS[0]) == alone["large", PROMPTS[0]]
    assert samples(served, "quantkit:engine_restarts_total") == {"large": 1, "small": 0, "packed": 0}
    assert json.loads(served.ask("GET", "/page/status?model=large")[2])["live"]["restarts"] == 1
    died = [event for event in served.events() if "died" in event["message"]]
    assert [event["model"] for event in died] == ["large"]


def test_the_end_waits_for_all_and_the_log_names_them(served: Any) -> None:
    long = {"prompt": "A", "max_tokens": 80, "ignore_eos": True, "stream": True}
    with served.connection() as first, served.connection() as second:
        responses = [
            served.send(connection, "POST", "/v1/completions", long | {"model": name})
            for connection, name in ((first, "large"), (second, "small"))
        ]
        assert all(response.readline().startswith(b"data: ") for response in responses)
        engines = served.children
        served.process.send_signal(signal.SIGTERM)
        answers = [response.read().decode() for response in responses]
    assert all('"finish_reason":"length"' in answer for answer in answers)
    assert all(answer.rstrip().endswith("data: [DONE]") for answer in answers)
    assert served.end() == 0
    assert not any(Path(f"/proc/{engine}").exists() for engine in engines)
    assert [event["open_requests"] for event in served.events() if event["message"] == "draining"] == [2]
    assert served.events()[-1]["message"] == "stopped"
    told = [event for event in served.events() if event.get("generated_tokens") == 80]
    assert {(event["model"], event["key_name"]) for event in told} == {("large", "tester"), ("small", "tester")}
