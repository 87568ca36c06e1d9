"""One OpenTelemetry span for each request, with its phases as children, sent to a collector over OTLP.

    chat demo  ├ tokenize ┼ queue ┼ prefill ┼ decode ┤      event: first token, where decoding begins

Spans are made when a request has ended, from the times that were taken for the log anyway: a token costs nothing. A
thread of OpenTelemetry's sends them; a collector that is gone delays no request. Attributes are those of the semantic
conventions for generative AI. Texts are never in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from quantkit.runtime.server.version import package_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PATH = "/v1/traces"  # OTLP's, below the address of a collector
_SEND_SECONDS = 5.0  # that a collector may take
_PHASES = ("tokenize", "queue", "prefill", "decode")
Attribute = str | bool | int | float | Sequence[str]


@dataclass(frozen=True)
class TracedRequest:
    """What a span says. Times are seconds since the request arrived; None for what it did not come to."""

    operation: str  # chat or text_completion
    model: str  # that was asked for
    headers: Mapping[str, str]  # may name the span that it belongs to
    arrived: int  # nanoseconds since 1970
    submitted: float | None
    scheduled: float | None
    first_token: float | None
    ended: float
    attributes: Mapping[str, Attribute | None]
    error: str | None  # a word for it

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Name, begin and end; the last one is that in which the request ended."""
        times = (0.0, self.submitted, self.scheduled, self.first_token, self.ended)
        for name, (begin, end) in zip(_PHASES, pairwise(times), strict=True):
            assert begin is not None
            yield name, begin, self.ended if end is None else min(end, self.ended)
            if end is None:
                return


class RequestTraces:
    """Makes spans; `provider` says where they go."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("quantkit", package_version())
        self._parents = TraceContextTextMapPropagator()  # W3C's traceparent

    def record(self, request: TracedRequest) -> None:
        """A request has ended, however it did."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        def at(seconds: float) -> int:
            return request.arrived + int(seconds * 1e9)

        named = {"gen_ai.operation.name": request.operation, "gen_ai.provider.name": "quantkit"}
        named |= {"gen_ai.request.model": request.model}
        known = {name: value for name, value in request.attributes.items() if value is not None}
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=self._parents.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={**named, **known},
            start_time=at(0),
        )
        if request.error is not None:
            span.set_attribute("error.type", request.error)
            span.set_status(Status(StatusCode.ERROR, request.error))
        if request.first_token is not None:
            span.add_event("first token", timestamp=at(request.first_token))
        inside = set_span_in_context(span)
        for name, begin, end in request.phases():
            self._tracer.start_span(name, context=inside, start_time=at(begin)).end(at(end))
        span.end(at(request.ended))

    def close(self) -> None:
        """Sends what was not sent yet."""
        self._provider.shutdown()


def open_traces(endpoint: str) -> RequestTraces:
    """Spans for the collector at this address, such as http://127.0.0.1:4318."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "quantkit"}))
    exporter = OTLPSpanExporter(endpoint.rstrip("/") + _PATH, timeout=_SEND_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTraces(provider)
