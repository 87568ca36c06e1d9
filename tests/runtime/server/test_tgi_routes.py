"""TGI's routes: huggingface_hub's own client against a live server, and what is refused, guarded and counted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from quantkit.errors import InputError
from quantkit.runtime.server.config_file import ApiKey
from quantkit.runtime.server.models.model_list import load_model_settings
from quantkit.runtime.watermark_detector import detect_watermark

PROMPT = "The function returns"
KEY = "alice-0123456789abcdef"
SECRET = "a secret for watermarks"


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    secret = tmp_path_factory.mktemp("keys") / "secret.txt"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    return start_server(tgi_routes=True, watermark_key_file=str(secret))


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[InferenceClient]:
    with InferenceClient(server.base_url) as made:
        yield made


def generate(server: Any, inputs: str = PROMPT, **parameters: Any) -> Any:
    return server.ask("POST", "/generate", {"inputs": inputs, "parameters": parameters})


def test_text(client: InferenceClient, server: Any) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=8)
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    assert text == server.ask("POST", "/v1/completions", asked).json["choices"][0]["text"] != ""
    assert client.text_generation(PROMPT, max_new_tokens=8, return_full_text=True) == PROMPT + text
    assert generate(server, max_new_tokens=8).json == {"generated_text": text}
    shortened = client.text_generation("In the year. " + PROMPT, max_new_tokens=8, truncate=3)
    ids = server.ask("POST", "/tokenize", {"prompt": "In the year. " + PROMPT}).json["tokens"][-3:]
    assert shortened == server.ask("POST", "/v1/completions", asked | {"prompt": ids}).json["choices"][0]["text"]


def test_details(client: InferenceClient, server: Any) -> None:
    found = client.text_generation(
        PROMPT, details=True, decoder_input_details=True, max_new_tokens=8, top_n_tokens=2, seed=3, temperature=0.7
    )
    assert found.details is not None
    assert found.details.finish_reason == "length"
    assert found.details.generated_tokens == len(found.details.tokens) == 8
    assert found.details.seed == 3
    assert "".join(token.text for token in found.details.tokens) == found.generated_text
    assert all(token.logprob <= 0 and not token.special for token in found.details.tokens)
    ids = server.ask("POST", "/tokenize", {"prompt": PROMPT}).json["tokens"]
    assert [token.id for token in found.details.prefill] == ids
    assert found.details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in found.details.prefill[1:])
    assert found.details.top_tokens is not None
    assert [len(row) for row in found.details.top_tokens] == [2] * 8  # of dicts: the client parses no lists of lists
    assert all(row[0]["logprob"] >= row[1]["logprob"] for row in found.details.top_tokens)


def test_streams(client: InferenceClient) -> None:
    whole = client.text_generation(PROMPT, max_new_tokens=16, details=True)
    events = list(client.text_generation(PROMPT, max_new_tokens=16, details=True, stream=True))
    assert [event.index for event in events] == list(range(1, 17))
    assert "".join(event.token.text for event in events) == whole.generated_text
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert all(event.generated_text is event.details is None for event in events[:-1])
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details is not None
    assert (events[-1].details.finish_reason, events[-1].details.generated_tokens) == ("length", 16)
    assert events[-1].details.input_length > 1
    assert "".join(client.text_generation(PROMPT, max_new_tokens=16, stream=True)) == whole.generated_text


def test_stop_sequences(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=32)
    stop = text[6:9]
    wanted = text[: text.index(stop) + 3]  # as TGI, with the stop sequence
    found = client.text_generation(PROMPT, max_new_tokens=32, stop=[stop], details=True)
    assert (found.generated_text, found.details.finish_reason) == (wanted, "stop_sequence")
    *_, last = events = list(client.text_generation(PROMPT, max_new_tokens=32, stop=[stop], details=True, stream=True))
    assert "".join(event.token.text for event in events) == last.generated_text == wanted
    assert last.details.finish_reason == "stop_sequence"


def test_an_end_token_is_a_token_without_text(client: InferenceClient) -> None:
    """A grammar leaves the model nothing but its end."""
    grammar: Any = {"type": "regex", "value": "(yes|no)"}
    found = client.text_generation(PROMPT, max_new_tokens=32, grammar=grammar, details=True)
    assert found.generated_text in ("yes", "no")
    assert found.details.finish_reason == "eos_token"
    events = list(client.text_generation(PROMPT, max_new_tokens=32, grammar=grammar, details=True, stream=True))
    assert [event.token.id for event in events] == [token.id for token in found.details.tokens]
    assert "".join(event.token.text for event in events if not event.token.special) == found.generated_text
    schema: Any = {"type": "json", "value": {"type": "object", "properties": {"a": {"type": "boolean"}},
                                             "required": ["a"], "additionalProperties": False}}  # fmt: skip
    assert json.loads(client.text_generation(PROMPT, max_new_tokens=64, grammar=schema)).keys() == {"a"}


def test_best_of_gives_the_likeliest(client: InferenceClient) -> None:
    found = client.text_generation(PROMPT, max_new_tokens=6, do_sample=True, best_of=4, details=True, seed=1)
    others = found.details.best_of_sequences
    means = [sum(t.logprob for t in one.tokens) / len(one.tokens) for one in (found.details, *others)]
    assert len(means) == 4
    assert means == sorted(means, reverse=True)
    assert len({found.generated_text, *(one.generated_text for one in others)}) > 1


def test_sampling_begins_where_it_begins_in_tgi(client: InferenceClient) -> None:
    greedy = client.text_generation(PROMPT, max_new_tokens=12)
    assert client.text_generation(PROMPT, max_new_tokens=12, temperature=1.0, seed=5) == greedy
    for asked in ({"do_sample": True}, {"temperature": 1.5}, {"top_k": 50}, {"top_p": 0.99}):
        drawn = {client.text_generation(PROMPT, max_new_tokens=12, seed=seed, **asked) for seed in range(3)}
        assert len(drawn) > 1, asked


def test_watermarks_are_found(client: InferenceClient, start_server: Any) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=120, do_sample=True, seed=1, watermark=True)
    assert detect_watermark(text, SECRET, model="demo-draft").found()
    assert not detect_watermark(text, "another secret key", model="demo-draft").found()
    with pytest.raises(ValidationError, match="watermark_key_file"):
        InferenceClient(start_server(tgi_routes=True).base_url).text_generation(PROMPT, watermark=True)


REFUSED = {
    "typical_p": {"typical_p": 0.5},
    "adapter_id": {"adapter_id": "x"},
    "num_beams": {"num_beams": 4},
    "temperature": {"temperature": 0},
    "stop": {"stop": "x"},
    "best_of": {"best_of": 2},
    "grammar": {"grammar": {"type": "regex", "value": "("}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name(server: Any, name: str) -> None:
    reply = generate(server, **REFUSED[name])
    assert reply.status == 422
    assert set(reply.json) == {"error", "error_type"}
    assert reply.json["error_type"] == "validation"
    assert name in reply.json["error"] or (name == "grammar" and "regex" in reply.json["error"])


def test_what_cannot_be_streamed_is_refused(client: InferenceClient, server: Any) -> None:
    for asked in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True, "details": True}):
        with pytest.raises(ValidationError, match=next(iter(asked))):
            list(client.text_generation(PROMPT, stream=True, **asked))
    for body in (b"{", b"", json.dumps({"inputs": PROMPT, "stream": True}).encode(), b'{"inputs": ""}'):
        reply = server.ask("POST", "/generate", body)
        assert (reply.status, reply.json["error_type"]) == (422, "validation")


def test_what_is_served(server: Any) -> None:
    info = InferenceClient(provider="hf-inference").get_endpoint_info(model=server.base_url)
    assert (info["model_id"], info["model_device_type"]) == ("demo", "cpu")
    assert info["max_total_tokens"] == 512
    assert InferenceClient(provider="hf-inference").health_check(model=server.base_url)
    routes = server.ask("GET", "/openapi.json").json["paths"]
    assert {"/generate", "/generate_stream", "/info"} < set(routes)
    assert "422" in routes["/generate"]["post"]["responses"]
    assert set(routes["/"]) == {"post"} or "get" in routes["/"]
    assert server.ask("GET", "/").status == 200


def test_the_routes_are_guarded_counted_and_off_unless_asked_for(start_server: Any, live_server: Any) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        assert live_server.ask("POST", path, {"inputs": PROMPT}).status in (404, 405)
    server = start_server(tgi_routes=True, api_keys=(ApiKey.of("alice", KEY),), rate_limit_requests_per_minute=4)
    for method, path in (("POST", "/generate"), ("POST", "/generate_stream"), ("POST", "/"), ("GET", "/info")):
        reply = server.ask(method, path, {"inputs": PROMPT})
        assert (reply.status, reply.json["error_type"]) == (401, "authentication")
    assert server.ask("GET", "/").status == 200
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
    statuses = [server.ask("POST", "/", asked, Authorization=f"Bearer {KEY}").status for _ in range(5)]
    assert statuses == [200] * 4 + [429]
    assert server.ask("POST", "/", asked, Authorization=f"Bearer {KEY}").json["error_type"] == "overloaded"
    metrics = server.ask("GET", "/metrics").content.decode()
    assert 'quantkit:requests_total{model_name="demo"} 4.0' in metrics
    assert 'status="401"' in metrics


def test_several_models_have_no_tgi_routes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tgi_routes"):
        load_model_settings(("a=demo", "b=demo-draft"), {"tgi_routes": True}, None, {})
