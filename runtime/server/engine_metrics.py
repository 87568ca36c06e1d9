"""Metric families: the numbers of the engine, read when somebody asks, and the same under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quantkit.runtime.server.version import package_version

if TYPE_CHECKING:
    from quantkit.runtime.server.engine_process.client import EngineInfo, EngineStats

PREFIX, VLLM_PREFIX = "quantkit:", "vllm:"
_OLDER_NAMES = {  # what dashboards for earlier versions of vLLM read
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
}
_OURS_ALONE = {
    "build_info",
    "engine_ready",
    "engine_restarts",
    "kv_pages_total",
    "kv_pages_used",
    "rehearsal_left",
    "request_refused",
    "requests",
    "routed_requests",
    "shadow",
    "spec_decode_saved_seconds",
}
# Numbers of the engine process that grow from 0 on. Saved seconds may fall: wrong guesses cost time.
_GROWING = (
    *("prompt_tokens", "reused_tokens", "generated_tokens", "preemptions"),
    *("steps", "draft_steps", "guessed_tokens", "accepted_tokens"),
)
_STEADY = (*_GROWING, "saved_seconds")


class EngineCollector(Collector):
    """Numbers of the engine as metric families, read when they are asked for."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        info: EngineInfo,
        model_name: str,
        restarts: Callable[[], int],
        shadow: Callable[[], dict[str, Any] | None],
        ready: Callable[[], bool],
    ) -> None:
        self._stats, self._info, self._model = stats, info, model_name
        self.restarts, self.shadow, self._ready = restarts, shadow, ready
        self._seen = dict.fromkeys(_STEADY, 0.0)  # the newest values, and what processes before this one had counted
        self._before = dict.fromkeys(_STEADY, 0.0)

    @property
    def speculates(self) -> bool:
        return self._info.speculates

    def newest(self) -> tuple[EngineStats, dict[str, float]]:
        """The statistics, and their counters over all engine processes: a new process counts from 0."""
        stats = self._stats()
        now = {name: getattr(stats, name) for name in _STEADY}
        if any(now[name] < self._seen[name] for name in _GROWING):
            self._before = {name: self._before[name] + self._seen[name] for name in _STEADY}
        self._seen = now
        return stats, {name: self._before[name] + self._seen[name] for name in _STEADY}

    def collect(self) -> Iterator[Metric]:
        stats, steady = self.newest()
        usage = stats.kv_pages_used / stats.kv_pages_total if stats.kv_pages_total else 0.0
        yield self._gauge("num_requests_running", "Answers that the engine computes.", stats.running)
        yield self._gauge("num_requests_waiting", "Answers that wait for the engine.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", usage)
        yield self._gauge("kv_pages_used", "Pages of the cache in use.", stats.kv_pages_used)
        yield self._gauge("kv_pages_total", "Pages of the cache.", stats.kv_pages_total)
        yield self._counter("prompt_tokens", "Tokens of prompts.", steady["prompt_tokens"])
        yield self._counter("generation_tokens", "New tokens.", steady["generated_tokens"])
        yield self._counter("prefix_cache_queries", "Tokens looked up in the cache.", steady["prompt_tokens"])
        yield self._counter("prefix_cache_hits", "Tokens found in the cache.", steady["reused_tokens"])
        yield self._counter("num_preemptions", "Answers that had to give way.", steady["preemptions"])
        yield self._gauge("engine_ready", "1 where the engine process answers, 0 where there is none.", self._ready())
        yield self._gauge("rehearsal_left", "Parts of the warm-up that are still to do.", stats.rehearsal_left)
        yield self._counter("engine_restarts", "New engine processes after one died.", self.restarts())
        if self.speculates:
            yield from self._guesses(steady)
        yield self._build_info()
        yield from self._shadow_numbers()

    def _guesses(self, steady: dict[str, float]) -> Iterator[Metric]:
        """As vLLM names them. Tokens of a step with guesses are 1 + accepted tokens / drafts."""
        yield self._counter("spec_decode_num_drafts", "Steps of answers with guesses.", steady["draft_steps"])
        yield self._counter("spec_decode_num_draft_tokens", "Guessed tokens.", steady["guessed_tokens"])
        yield self._counter("spec_decode_num_accepted_tokens", "Right guesses.", steady["accepted_tokens"])
        yield self._gauge("spec_decode_saved_seconds", "Time that guesses saved.", steady["saved_seconds"])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _build_info(self) -> Metric:
        info = self._info
        labels = {
            "model_name": self._model,
            "version": package_version(),
            "format": info.format,
            "device": info.device,
            "dtype": info.dtype,
            "kv_dtype": info.kv_dtype,
            "kv_reason": info.kv_reason,
        }
        family = GaugeMetricFamily(PREFIX + "build_info", "What is served, always 1.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _shadow_numbers(self) -> Iterator[Metric]:
        numbers = {name: value for name, value in (self.shadow() or {}).items() if isinstance(value, int | float)}
        if numbers:
            family = GaugeMetricFamily(PREFIX + "shadow", "Comparison with --shadow.", labels=["model_name", "number"])
            for name, value in numbers.items():
                family.add_metric([self._model, name], value)
            yield family


class Together(Collector):
    """The families of several models, each name once: a reader takes a second one of the same name for a mistake."""

    def __init__(self, each: Sequence[Collector | CollectorRegistry]) -> None:
        self._each = each

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for one in self._each:
            for family in one.collect():
                known = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples = [*known.samples, *family.samples]
        yield from found.values()


class BothPrefixes(Collector):
    """All families of a registry, and those that vLLM has under its names too, older ones included."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            name = family.name.removeprefix(PREFIX)
            if name not in _OURS_ALONE:
                yield _renamed(family, VLLM_PREFIX + name)
            if name in _OLDER_NAMES:
                yield _renamed(family, VLLM_PREFIX + _OLDER_NAMES[name])


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
    return renamed
