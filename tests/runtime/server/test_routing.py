"""Virtual models on a live server: who answers, how the client asks for more, and what is told of it.

`small` is a quantized `demo-draft` with short contexts, `large` the model of the other tests. The list names `large`
first: the order of `auto` comes from bytes of weights.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from quantkit.runtime.server.tracing import RequestTraces
from quantkit.runtime.server.virtual_models import VirtualModel

PROMPT = "The function returns"
QUESTION: Any = [{"role": "user", "content": "What is a list?"}]
TOOLS = [{"type": "function", "function": {"name": "find"}}]
AUTO = VirtualModel("auto", "cheapest", ("large", "small"), "weights")
LISTED = VirtualModel("listed", "cheapest", ("large", "small"), "listed")
HELPER = VirtualModel("helper", "escalate", ("small", "large"), "listed")
SPANS = InMemorySpanExporter()


@pytest.fixture(scope="module")
def small_settings(quantized_draft: Callable[..., Path]) -> dict[str, Any]:
    model = str(quantized_draft("nf4"))
    sizes = {"max_context": 192, "kv_tokens": 2048, "max_queue": 1, "warm_up": False}
    return {"model": model, "served_model_name": ["small"]} | sizes


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], small_settings: dict[str, Any]) -> Any:
    """`server.engine` is that of `small`, which is named first."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    return start_server(
        **small_settings,
        tool_parser="none",
        virtual_models=(AUTO, LISTED, HELPER),
        also={"served_model_name": ["large"]},
        traces=RequestTraces(provider),
    )


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def complete(client: openai.OpenAI, model: str, max_tokens: int = 8, **options: Any) -> Any:
    asked: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return client.completions.create(**asked | options)


def routed(server: Any) -> dict[tuple[str, str, str], float]:
    """(virtual model, model, reason) -> requests."""
    text = server.ask("GET", "/metrics").content.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (one.labels["virtual_model"], one.labels["model_name"], one.labels["reason"]): one.value
        for one in samples
        if one.name == "quantkit:routed_requests_total"
    }


@pytest.fixture
def newly_routed(server: Any) -> Callable[[], dict[tuple[str, str, str], float]]:
    before = routed(server)
    return lambda: {
        key: value - before.get(key, 0) for key, value in routed(server).items() if value != before.get(key)
    }


def test_cheapest_is_the_lightest_whose_context_holds_prompt_and_answer(
    client: openai.OpenAI, newly_routed: Callable[[], Any]
) -> None:
    short, long = complete(client, "auto"), complete(client, "auto", max_tokens=200)
    assert (short.model, long.model) == ("small", "large")
    assert short.choices[0].text == complete(client, "small").choices[0].text
    assert long.choices[0].text == complete(client, "large", max_tokens=200).choices[0].text
    assert complete(client, "auto", prompt="word " * 200).model == "large"
    assert complete(client, "listed").model == "large"
    counted = {("auto", "small", "first"): 1, ("auto", "large", "context"): 2, ("listed", "large", "first"): 1}
    assert newly_routed() == counted


def test_without_a_limit_the_prompt_alone_must_fit(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="auto", messages=QUESTION, temperature=0)
    assert answer.model == "small"
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 192


def test_where_none_fits_the_longest_context_is_named(server: Any, newly_routed: Callable[[], Any]) -> None:
    for virtual in ("auto", "listed", "helper"):
        reply = server.ask("POST", "/v1/completions", {"model": virtual, "prompt": PROMPT, "max_tokens": 600})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "the answer may have 600, but contexts end at 512; shorten the one" in reply.error["message"]
        assert "of the models asked, 'large' has the longest" in reply.error["message"]
    assert newly_routed() == {}


def test_a_stream_names_its_model_in_every_chunk(client: openai.OpenAI) -> None:
    for max_tokens, model in ((8, "small"), (200, "large")):
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(
            model="auto", messages=QUESTION, temperature=0, max_tokens=max_tokens, **options
        ))  # fmt: skip
        assert {chunk.model for chunk in chunks} == {model}
        assert {chunk.model for chunk in complete(client, "auto", max_tokens=max_tokens, stream=True)} == {model}


def test_a_client_escalates(client: openai.OpenAI, newly_routed: Callable[[], Any]) -> None:
    for asked, model in ((None, "small"), (False, "small"), (0, "small"), (True, "large"), (1, "large")):
        assert complete(client, "helper", extra_body={"escalate": asked}).model == model
    assert complete(client, "helper", max_tokens=200).model == "large"
    counted = {("helper", "small", "first"): 3, ("helper", "large", "escalated"): 2, ("helper", "large", "context"): 1}
    assert newly_routed() == counted


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (
            {"model": "helper", "escalate": 2},
            "is 2, but 'helper' has 1 after its first: small, large",
            "escalate",
        ),
        ({"model": "helper", "escalate": -1}, "escalate", "escalate"),
        ({"model": "auto", "escalate": True}, "which 'auto' is not; this server has helper", "escalate"),
        ({"model": "small", "escalate": 1}, "which 'small' is not; this server has helper", "escalate"),
        ({"model": "auto", "prompt": [5, 6]}, "prompt has token ids, which mean something else to each", "prompt"),
        ({"model": "auto", "logit_bias": {"5": 1}}, "name one of: large, small", "logit_bias"),
        ({"model": "auto", "stop_token_ids": [5]}, "send text", "stop_token_ids"),
        ({"model": "auto", "min_tokens": 9, "max_tokens": 8}, "min_tokens is 9", "min_tokens"),
    ],
)
def test_what_no_model_could_do_is_refused_at_once(
    server: Any, newly_routed: Callable[[], Any], body: Any, words: str, param: str
) -> None:
    reply = server.ask("POST", "/v1/completions", {"prompt": PROMPT} | body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]
    assert newly_routed() == {}


def test_a_model_that_calls_no_tools_is_passed_over(server: Any, newly_routed: Callable[[], Any]) -> None:
    chat = {"messages": QUESTION, "max_tokens": 4, "tools": TOOLS}
    models = [
        server.ask("POST", "/v1/chat/completions", chat | more).json["model"]
        for more in ({"model": "auto"}, {"model": "auto", "tool_choice": "none"}, {"model": "small"})
    ]
    assert models == ["large", "small", "small"], "who names a model gets that model"
    assert newly_routed() == {("auto", "large", "capability"): 1, ("auto", "small", "first"): 1}


def test_a_model_whose_queue_is_full_is_passed_over(
    server: Any, client: openai.OpenAI, newly_routed: Callable[[], Any]
) -> None:
    held = complete(client, "small", max_tokens=80, n=17, stream=True, extra_body={"ignore_eos": True})
    next(iter(held))
    assert complete(client, "auto").model == "large"
    held.close()
    server.wait_until_idle()
    assert newly_routed() == {("auto", "large", "busy"): 1}


def test_virtual_models_are_listed_with_their_members(server: Any, client: openai.OpenAI) -> None:
    found = {model.id: model.model_dump() for model in client.models.list()}
    assert list(found) == ["small", "large", "auto", "listed", "helper"]
    assert "members" not in found["small"]
    shown = [
        (found[name]["policy"], found[name]["members"], found[name]["max_model_len"]) for name in ("auto", "helper")
    ]
    assert shown == [("cheapest", ["small", "large"], 512), ("escalate", ["small", "large"], 512)]
    assert client.models.retrieve("auto").model_dump() == found["auto"]
    with pytest.raises(openai.NotFoundError, match="this server has: small, large, auto, listed, helper"):
        complete(client, "aut")
    for path in ("/tokenize", "/detokenize"):
        reply = server.ask("POST", path, {"model": "auto", "prompt": "A", "tokens": [1]})
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert "name one of: large, small" in reply.error["message"]


def test_log_and_trace_say_who_answered(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One line and one span, although two models were asked."""
    SPANS.clear()
    body = {"model": "auto", "prompt": PROMPT, "max_tokens": 200}
    with caplog.at_level(logging.INFO):
        server.ask("POST", "/v1/completions", body, X_Request_Id="routed")
        end = time.monotonic() + 5
        while not (told := [one.fields for one in caplog.records if "routed" in str(getattr(one, "fields", ""))]):
            assert time.monotonic() < end
            time.sleep(0.01)
    (fields,) = told
    assert (fields["model"], fields["virtual_model"], fields["routing_reason"]) == ("large", "auto", "context")
    assert "error" not in fields
    (span,) = [one for one in SPANS.get_finished_spans() if one.parent is None]
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "auto"
    assert span.attributes["gen_ai.response.model"] == "large"


def test_a_model_that_dies_is_passed_over(
    start_server: Callable[..., Any], server: Any, small_settings: dict[str, Any], newly_routed: Callable[[], Any]
) -> None:
    """The last of this file: its engine comes back after the others. What it died of is not given to the next one."""
    both = VirtualModel("both", "cheapest", ("small", "same"), "weights")
    alone = start_server(
        **small_settings, virtual_models=(both,), also=small_settings | {"served_model_name": ["same"]}
    )
    asked = {"model": "auto", "prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "n": 16}
    replies: list[Any] = []
    waiting = threading.Thread(target=lambda: replies.append(server.ask("POST", "/v1/completions", asked)))
    waiting.start()
    server.wait_until(lambda stats: stats.running > 0)
    os.kill(server.engine.pid, signal.SIGKILL)
    end = time.monotonic() + 5
    while server.engine.ready:
        assert time.monotonic() < end
    reply = server.ask("POST", "/v1/completions", asked | {"n": 1, "max_tokens": 4})
    assert reply.json["model"] == "large"
    assert server.ask("GET", "/health").json["models"] == {"small": "down", "large": "ready"}
    assert [server.ask("GET", f"/ready?model={name}").status for name in ("small", "auto")] == [503, 200]
    refused = alone.ask("POST", "/v1/completions", asked | {"model": "both"})
    assert (refused.status, refused.error["code"]) == (503, "engine_unavailable")
    assert refused.headers["retry-after"]
    assert alone.ask("GET", "/ready?model=both").status == 503
    waiting.join()
    assert (replies[0].status, replies[0].error["code"]) == (503, "engine_unavailable")
    assert newly_routed() == {("auto", "small", "first"): 1, ("auto", "large", "unavailable"): 1}
