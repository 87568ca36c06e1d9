"""What the server counts: for Prometheus (`render`) and for the page (`snapshot`).

Names are those of vLLM under our own prefix, so that its dashboards need one change; with `vllm_names` they are exposed
under vLLM's prefix too. Numbers of the engine are read from its newest statistics when somebody asks; what only the
server sees (times, answers, refusals) is counted as it happens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from quantkit.runtime.server.engine_metrics import PREFIX, BothPrefixes, EngineCollector, Together

if TYPE_CHECKING:
    from quantkit.runtime.server.engine_process.client import EngineInfo, EngineStats

REASONS = ("stop", "length", "tool_calls", "abort", "error")
RoutingReason = Literal["first", "escalated", "context", "capability", "busy", "unavailable"]
WINDOW_SECONDS = 60.0  # of medians
RATE_SECONDS = 5.0  # of tokens per second
_KEPT_GAPS = 4096  # newest gaps between tokens that a median looks at

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_FIRST_TOKEN = (*_LATENCY, 20.0, 40.0, 80.0, 160.0)
_GAP = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """Called by the API for every request; see the methods for when."""

    def __init__(
        self,
        client_stats: Callable[[], EngineStats],
        info: EngineInfo,
        vllm_names: bool = False,
        *,
        model_name: str | None = None,
        restarts: Callable[[], int] = lambda: 0,
        shadow: Callable[[], dict[str, Any] | None] = lambda: None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """`model_name` is the label of every metric (default: the model), `shadow` gives named numbers, if any."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every one, which nobody reads
        self._model = info.model if model_name is None else model_name
        self._engine = EngineCollector(client_stats, info, self._model, restarts, shadow, ready)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._engine)
        self._make_instruments()
        self._exposed = BothPrefixes(self._registry) if vllm_names else self._registry
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT_GAPS)
        self._firsts: deque[tuple[float, float]] = deque(maxlen=_KEPT_GAPS)
        self._tokens = _Rate(RATE_SECONDS)
        self._requests_total = 0

    def _make_instruments(self) -> None:
        self._started = self._counter("requests", "Requests that were accepted.")
        self._queue_time = self._histogram("request_queue_time_seconds", "From arrival to first scheduling.", _REQUEST)
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to first token.", _FIRST_TOKEN)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _GAP)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = self._histogram("request_generation_tokens", "New tokens of a request.", _TOKENS)
        finished = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(self._model, reason) for reason in REASONS}
        self._refused = Counter(
            PREFIX + "request_refused",
            "Requests that were refused, by HTTP status.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._routed = Counter(
            PREFIX + "routed_requests",
            "Requests for a virtual model that were accepted, by it and by why this one took them.",
            ["model_name", "virtual_model", "reason"],
            registry=self._registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=tuple(buckets))
        return made.labels(self._model)

    def request_started(self) -> None:
        """A request was accepted: its input is right and there is room for it."""
        self._requests_total += 1
        self._started.inc()

    def request_queued(self, seconds: float) -> None:
        """How long it waited for the engine; once a request."""
        self._queue_time.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Since the request arrived; once for each answer."""
        now = time.monotonic()
        self._first_token.observe(seconds)
        self._firsts.append((now, seconds))
        self._tokens.add(now)

    def token_gap(self, seconds: float) -> None:
        """Since the token before, for every token after the first, whether the answer is streamed or not."""
        now = time.monotonic()
        self._gap.observe(seconds)
        self._gaps.append((now, seconds))
        self._tokens.add(now)

    def request_finished(
        self, reason: str, prompt_tokens: int, cached_tokens: int, generated_tokens: int, seconds: float
    ) -> None:
        """An accepted request ended. Cached tokens are counted by the engine, which knows them before the end."""
        self._finished[reason if reason in REASONS else "error"].inc()
        self._prompt.observe(prompt_tokens)
        self._answer.observe(generated_tokens)
        self._e2e.observe(seconds)

    def request_refused(self, status: int, *, model_known: bool = True) -> None:
        """A request was answered with an error and never reached the engine; it may not have said which."""
        self._refused.labels(self._model if model_known else "", str(status)).inc()

    def request_routed(self, virtual_model: str, reason: RoutingReason) -> None:
        """A request for a virtual model was accepted by this one. Both labels are words of the server."""
        self._routed.labels(self._model, virtual_model, reason).inc()

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its content type."""
        return render_together([self])

    def snapshot(self) -> dict[str, Any]:
        """The newest numbers, for people; None where nothing was measured within the window."""
        stats, steady = self._engine.newest()
        now = time.monotonic()
        pages = stats.kv_pages_total
        found: dict[str, Any] = {
            "tokens_per_second": round(self._tokens.per_second(now), 1),
            "ttft_ms_p50": _median_ms(self._firsts, now),
            "itl_ms_p50": _median_ms(self._gaps, now),
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_percent": round(100 * stats.kv_pages_used / pages, 1) if pages else 0.0,
            "prefix_hit_percent": _percent(steady["reused_tokens"], steady["prompt_tokens"]),
            "requests_total": self._requests_total,
            "restarts": self._engine.restarts(),
        }
        if self._engine.speculates:
            steps, accepted = steady["draft_steps"], steady["accepted_tokens"]
            found["acceptance_percent"] = _percent(accepted, steady["guessed_tokens"]) if steps else None
            found["tokens_per_step"] = round(1 + accepted / steps, 2) if steps else None
        shadow = self._engine.shadow()
        return found if shadow is None else found | {"shadow": shadow}


def render_together(each: Sequence[ServerMetrics], beside: Sequence[Collector] = ()) -> tuple[bytes, str]:
    """The metrics of all models of a server, and those that are of no model."""
    exposed = [*(one._exposed for one in each), *beside]
    return generate_latest(exposed[0] if len(exposed) == 1 else Together(exposed)), CONTENT_TYPE_PLAIN_0_0_4


class _Rate:
    """Events per second over the last seconds, counted in tenths of a second."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: deque[list[float]] = deque()  # [tenth, events]

    def add(self, now: float) -> None:
        tenth = int(now * 10)
        if self._counts and self._counts[-1][0] == tenth:
            self._counts[-1][1] += 1
            return
        self._counts.append([tenth, 1])
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Over the time since the first event, where that is shorter than the window."""
        self._forget(now)
        if not self._counts:
            return 0.0
        span = min(max(now - self._counts[0][0] / 10, 1.0), self._seconds)
        return sum(events for _, events in self._counts) / span

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] < (now - self._seconds) * 10:
            self._counts.popleft()


def _median_ms(samples: deque[tuple[float, float]], now: float) -> float | None:
    recent = [seconds for when, seconds in samples if now - when <= WINDOW_SECONDS]
    return round(1000 * median(recent), 2) if recent else None


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole else 0.0
