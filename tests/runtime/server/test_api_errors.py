"""Wrong requests: each gets a status, a sentence and the field at fault, and disturbs nobody."""

import json
from typing import Any

import openai
import pytest

from quantkit.runtime.server.errors import as_api_error

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def ask(server: Any, path: str, **fields: Any) -> Any:
    own = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    return server.ask("POST", path, {"model": "demo", "max_tokens": 1} | own | fields)


WRONG_ANYWHERE: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1000),
    ("n", "2"),
    ("n", 1.5),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 1e9),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 2**70),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", 2**64),
    ("seed", True),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**6]),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", [1]),
    ("min_tokens", -1),
    ("min_tokens", 5),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 1),
    ("priority", 5000),
    ("stream", "true"),
    ("stream_options", []),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("guided_choice", []),
    ("user", 5),
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("field", "value"), WRONG_ANYWHERE)
def test_wrong_values(live_server: Any, path: str, field: str, value: Any) -> None:
    reply = ask(live_server, path, **{field: value})
    assert reply.status == 400, reply.content
    error = reply.error
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == field, error
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "messages", []),
        (CHAT, "messages", "Hello"),
        (CHAT, "messages", [{"role": "user"}]),
        (CHAT, "messages", [{"role": "nobody", "content": "x"}]),
        (CHAT, "messages", [{"role": "user", "content": 5}]),
        (CHAT, "max_tokens", 0),
        (CHAT, "max_completion_tokens", 0),
        (CHAT, "logprobs", 3),
        (CHAT, "top_logprobs", 21),
        (CHAT, "top_logprobs", 2),  # without logprobs
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "some"),
        (CHAT, "chat_template_kwargs", {"messages": []}),
        (PLAIN, "prompt", []),
        (PLAIN, "prompt", None),
        (PLAIN, "prompt", [1, "two"]),
        (PLAIN, "prompt", [[]]),
        (PLAIN, "prompt", [-5]),
        (PLAIN, "logprobs", 21),
        (PLAIN, "best_of", 129),
        (PLAIN, "suffix", "the end"),
    ],
)
def test_wrong_values_of_one_route(live_server: Any, path: str, field: str, value: Any) -> None:
    error = ask(live_server, path, **{field: value}).error
    assert error["param"].split(".")[0].split("[")[0] == field, error


def test_the_path_to_a_wrong_value(live_server: Any) -> None:
    messages = [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": 5}]}]
    error = ask(live_server, CHAT, messages=messages).error
    assert error["param"].startswith("messages[1].content")


def test_images_are_refused_by_name(live_server: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    reply = ask(live_server, CHAT, messages=[{"role": "user", "content": [part]}])
    assert reply.status == 400
    assert "image_url" in reply.error["message"]
    assert "text only" in reply.error["message"]


def test_tokens_outside_the_vocabulary(live_server: Any) -> None:
    assert "vocabulary" in ask(live_server, PLAIN, prompt=[4096]).error["message"]
    assert live_server.ask("POST", "/detokenize", {"tokens": [4096]}).error["param"] == "tokens"
    assert live_server.ask("POST", "/tokenize", {}).error["param"] == "prompt"


def test_prompts_that_do_not_fit(live_server: Any) -> None:
    for path, fields in (
        (PLAIN, {"prompt": "word " * 600}),
        (CHAT, {"messages": [MESSAGES[0] | {"content": "x " * 999}]}),
    ):
        reply = ask(live_server, path, **fields)
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert "512" in reply.error["message"]
    assert ask(live_server, PLAIN, prompt="").status == 400


def test_two_guides_are_one_too_many(live_server: Any) -> None:
    reply = ask(live_server, CHAT, guided_regex="a+", response_format={"type": "json_object"})
    assert reply.status == 400
    assert "guided_regex" in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "("),
        ("guided_grammar", "start: nothing"),
        ("guided_json", "{"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}),
    ],
)
def test_guides_that_cannot_be(live_server: Any, field: str, value: Any, stream: bool) -> None:
    reply = ask(live_server, CHAT, **{field: value}, stream=stream)
    assert reply.status == 400, reply.content
    assert reply.error["param"] == field


def test_wrong_tools(live_server: Any) -> None:
    tool = {"type": "function", "function": {"name": "find"}}
    for fields, param in (
        ({"tools": [tool, tool]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [tool], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ):
        reply = ask(live_server, CHAT, **fields)
        assert reply.status == 400
        assert reply.error["param"] == param


def test_unknown_model(live_server: Any) -> None:
    for path in (CHAT, PLAIN):
        reply = ask(live_server, path, model="gpt-4")
        assert reply.status == 404
        assert reply.error["code"] == "model_not_found"
        assert "demo" in reply.error["message"]


def test_bodies_that_are_no_json(live_server: Any) -> None:
    for body in (b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"null", b"[" * 100_000, b'{"prompt": "\\ud800"}'):
        reply = live_server.ask("POST", PLAIN, body)
        assert reply.status == 400, (body[:20], reply.content)
        assert reply.error["message"]
    reply = live_server.ask("POST", PLAIN, {"prompt": "x"}, Content_Type="text/plain")
    assert reply.status == 400
    assert "application/json" in reply.error["message"]


def test_unknown_fields_are_ignored_and_null_is_nothing(live_server: Any) -> None:
    assert ask(live_server, CHAT, colour="blue", temperature=None, stop=None, n=None, tools=None).status == 200
    assert live_server.ask("POST", PLAIN, {"prompt": "x", "max_tokens": 1}).status == 200  # no model: the only one


def test_routes_that_do_not_exist(live_server: Any) -> None:
    assert live_server.ask("GET", "/v2/chat").error["code"] == "not_found"
    reply = live_server.ask("GET", CHAT)
    assert reply.status == 405
    assert reply.error["code"] == "method_not_allowed"


def test_the_client_raises_its_own_errors(live_server: Any) -> None:
    with live_server.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)  # type: ignore[arg-type]
        assert caught.value.param == "temperature"
        assert caught.value.type == "invalid_request_error"


def test_the_documentation_is_true(live_server: Any) -> None:
    schema = live_server.ask("GET", "/openapi.json").json
    for path in (CHAT, PLAIN):
        responses = schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "404", "413", "429", "503"} <= set(responses)
        assert "422" not in responses
        assert "401" not in responses  # this server has no keys
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_what_nobody_foresaw_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = as_api_error(KeyError("/home/somebody/model: a prompt of another"))
    assert error.status == 500
    assert "somebody" not in json.dumps(error.body)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "somebody" in str(record.exc_info[1])
