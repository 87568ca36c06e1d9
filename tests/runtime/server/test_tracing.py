"""Traces of requests, as OpenTelemetry's own SDK receives them from a live server."""

import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quantkit.errors import InputError
from quantkit.runtime.server.settings import load_settings
from quantkit.runtime.server.tracing import RequestTraces, TracedRequest, open_traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 6}


class Traced:
    """A server, and the spans that it has made."""

    def __init__(self, start_server: Callable[..., Any]) -> None:
        self.seen = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.seen))
        self.server = start_server(traces=RequestTraces(provider))

    def take(self) -> list[ReadableSpan]:
        """Those of the last request, the request's own at the end: a stream's are made after its last byte."""
        end = time.monotonic() + 10
        while not any(span.kind is SpanKind.SERVER for span in self.seen.get_finished_spans()):
            assert time.monotonic() < end
            time.sleep(0.005)
        found = list(self.seen.get_finished_spans())
        self.seen.clear()
        return found


@pytest.fixture(scope="module")
def traced(start_server: Callable[..., Any]) -> Traced:
    return Traced(start_server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_phases(traced: Traced, stream: bool) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    reply = traced.server.ask("POST", "/v1/chat/completions", CHAT | {"stream": stream}, traceparent=parent)
    assert reply.status == 200
    *phases, whole = traced.take()
    assert (whole.name, whole.kind, whole.status.status_code) == ("chat demo", SpanKind.SERVER, StatusCode.UNSET)
    assert whole.context is not None
    assert whole.parent is not None
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    told = dict(whole.attributes or {})
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "demo"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.usage.output_tokens"]) == (6, 6)
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    if not stream:
        assert told["gen_ai.response.id"] == reply.json["id"]
        assert told["gen_ai.usage.input_tokens"] == reply.json["usage"]["prompt_tokens"]
    assert [phase.name for phase in phases] == ["tokenize", "queue", "prefill", "decode"]
    assert all(phase.parent is not None and phase.parent.span_id == whole.context.span_id for phase in phases)
    times = [whole.start_time, *(phase.end_time for phase in phases)]
    assert times == sorted(times, key=int)
    assert times[1:-1] == [phase.start_time for phase in phases[1:]]  # one begins where the other ends
    assert times[-1] == whole.end_time
    (event,) = whole.events
    assert (event.name, event.timestamp) == ("first token", phases[-1].start_time)


def test_without_a_traceparent_it_is_a_trace_of_its_own(traced: Traced) -> None:
    reply = traced.server.ask(
        "POST", "/v1/completions", {"model": "demo", "prompt": "A", "max_tokens": 1}, traceparent="x"
    )
    assert reply.status == 200
    whole = traced.take()[-1]
    assert whole.parent is None
    assert whole.name == "text_completion demo"


def test_a_caller_that_does_not_sample_gets_no_spans(traced: Traced) -> None:
    assert traced.server.ask("POST", "/v1/chat/completions", CHAT, traceparent=f"00-{TRACE}-{PARENT}-00").status == 200
    assert traced.seen.get_finished_spans() == ()


def test_a_request_that_fails_says_why_and_where(traced: Traced) -> None:
    long = {"model": "demo", "prompt": "word " * 600}
    assert traced.server.ask("POST", "/v1/completions", long).error["code"] == "context_length_exceeded"
    phase, whole = traced.take()
    assert phase.name == "tokenize"
    assert whole.status.status_code is StatusCode.ERROR
    assert (whole.attributes or {})["error.type"] == "context_length_exceeded"
    assert not whole.events


def test_no_text_is_in_a_trace(traced: Traced) -> None:
    asked = CHAT | {"messages": [{"role": "user", "content": "a very private question"}]}
    assert traced.server.ask("POST", "/v1/chat/completions", asked).status == 200
    assert "private" not in "".join(span.to_json() for span in traced.take())


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "grpc://host", "http://a b", ""])
def test_an_endpoint_is_an_address(wrong: str) -> None:
    with pytest.raises(InputError, match=r"--otlp-endpoint is .* but must be the address of a collector"):
        load_settings({"model": "demo", "otlp_endpoint": wrong}, environment={})


def test_spans_arrive_at_a_collector() -> None:
    if "opentelemetry" not in sys.modules or find_spec("opentelemetry.exporter") is None:
        pytest.skip("needs the extra traces")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra traces")
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = open_traces(f"http://127.0.0.1:{collector.server_port}/")
        traces.record(TracedRequest("chat", "demo", {}, 10**18, 0.1, 0.2, 0.3, 0.5, {"gen_ai.response.id": "it"}, None))
        traces.close()
        collector.shutdown()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"chat demo" in body
    assert b"prefill" in body
