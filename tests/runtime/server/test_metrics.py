"""Metrics of the server: names, numbers, both prefixes, the dashboard and the guide that name them."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_nvml import FakeGpu, FakeNvml
from quantkit.runtime.server import metrics as metrics_module
from quantkit.runtime.server.engine_process.client import EngineInfo, EngineStats
from quantkit.runtime.server.gpu_metrics import GpuWatch
from quantkit.runtime.server.metrics import ServerMetrics

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "runtime" / "server" / "grafana" / "quantkit-dashboard.json"
INFO = EngineInfo(
    model="demo",
    format="nf4",
    bits=4.1,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    weights_bytes=1,
    kv_tokens=160,
    page_size=16,
    max_context=128,
    vocab=100,
    eos=(2,),
    max_sequences=4,
)
GUESSING = replace(INFO, speculates=True)
STATS = EngineStats(
    running=2,
    waiting=3,
    kv_pages_used=4,
    kv_pages_total=10,
    prompt_tokens=200,
    reused_tokens=50,
    generated_tokens=70,
    preemptions=1,
    steps=9,
    draft_steps=8,
    guessed_tokens=32,
    accepted_tokens=12,
    saved_seconds=-0.5,
)
VLLM = {  # what dashboards for vLLM read
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
}
VLLM_GUESSES = {  # where it speculates
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
}


def make(stats: Callable[[], EngineStats] = lambda: STATS, info: EngineInfo = INFO, **options: Any) -> ServerMetrics:
    return ServerMetrics(stats, info, **options)


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """`name{labels other than the model}` -> value."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"] == "demo", sample
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[sample.name + (f"{{{shown}}}" if shown else "")] = sample.value
    return found


def families(metrics: ServerMetrics) -> set[str]:
    return {family.name for family in text_string_to_metric_families(metrics.render()[0].decode())}


def test_requests_are_counted() -> None:
    metrics = make(restarts=lambda: 2)
    metrics.request_started()
    metrics.request_queued(0.2)
    metrics.first_token(0.03)
    metrics.token_gap(0.0015)
    metrics.token_gap(0.004)
    metrics.request_finished("length", prompt_tokens=12, cached_tokens=4, generated_tokens=3, seconds=0.5)
    metrics.request_refused(429)
    metrics.request_refused(429)
    found = samples(metrics)
    assert found["quantkit:requests_total"] == 1
    assert found["quantkit:request_queue_time_seconds_sum"] == pytest.approx(0.2)
    assert found["quantkit:time_to_first_token_seconds_count"] == 1
    assert found["quantkit:inter_token_latency_seconds_bucket{le=0.001}"] == 0
    assert found["quantkit:inter_token_latency_seconds_bucket{le=0.002}"] == 1
    assert found["quantkit:inter_token_latency_seconds_count"] == 2
    assert found["quantkit:e2e_request_latency_seconds_sum"] == pytest.approx(0.5)
    assert found["quantkit:request_success_total{finished_reason=length}"] == 1
    assert found["quantkit:request_success_total{finished_reason=stop}"] == 0
    assert found["quantkit:request_refused_total{status=429}"] == 2
    assert found["quantkit:engine_restarts_total"] == 2
    assert found["quantkit:request_prompt_tokens_sum"] == 12
    assert found["quantkit:request_generation_tokens_sum"] == 3


def test_numbers_of_the_engine_are_read_when_asked() -> None:
    stats = [STATS]
    metrics = make(lambda: stats[0])
    assert samples(metrics)["quantkit:num_requests_running"] == 2
    stats[0] = replace(STATS, running=5)
    found = samples(metrics)
    assert found["quantkit:num_requests_running"] == 5
    assert found["quantkit:num_requests_waiting"] == 3
    assert found["quantkit:kv_cache_usage_perc"] == pytest.approx(0.4)
    assert (found["quantkit:kv_pages_used"], found["quantkit:kv_pages_total"]) == (4, 10)
    assert (found["quantkit:prefix_cache_queries_total"], found["quantkit:prefix_cache_hits_total"]) == (200, 50)
    assert (found["quantkit:prompt_tokens_total"], found["quantkit:generation_tokens_total"]) == (200, 70)
    assert found["quantkit:num_preemptions_total"] == 1


def test_counters_do_not_fall_when_the_engine_starts_anew() -> None:
    stats = [STATS]
    metrics = make(lambda: stats[0])
    assert samples(metrics)["quantkit:generation_tokens_total"] == 70
    stats[0] = EngineStats(kv_pages_total=10)
    assert samples(metrics)["quantkit:generation_tokens_total"] == 70
    stats[0] = EngineStats(kv_pages_total=10, generated_tokens=5)
    assert samples(metrics)["quantkit:generation_tokens_total"] == 75
    assert metrics.snapshot()["prefix_hit_percent"] == 25.0


def test_guesses_are_counted_where_there_are_any() -> None:
    assert not any("spec_decode" in name for name in samples(make()))
    stats = [STATS]
    metrics = make(lambda: stats[0], GUESSING)
    found = samples(metrics)
    assert found["quantkit:spec_decode_num_drafts_total"] == 8
    assert found["quantkit:spec_decode_num_draft_tokens_total"] == 32
    assert found["quantkit:spec_decode_num_accepted_tokens_total"] == 12
    assert found["quantkit:spec_decode_saved_seconds"] == -0.5
    live = metrics.snapshot()
    assert (live["acceptance_percent"], live["tokens_per_step"]) == (37.5, 2.5)
    stats[0] = replace(STATS, saved_seconds=-2.0)  # the same process: guesses went wrong
    assert samples(metrics)["quantkit:spec_decode_saved_seconds"] == -2.0
    stats[0] = EngineStats(draft_steps=1, guessed_tokens=4, accepted_tokens=4, saved_seconds=0.25)  # a new process
    found = samples(metrics)
    assert found["quantkit:spec_decode_num_draft_tokens_total"] == 36
    assert found["quantkit:spec_decode_saved_seconds"] == -1.75


def test_a_server_that_has_not_guessed_yet_shows_no_share() -> None:
    live = make(EngineStats, GUESSING).snapshot()
    assert live["acceptance_percent"] is live["tokens_per_step"] is None


def test_an_unknown_reason_makes_no_new_series() -> None:
    metrics = make()
    metrics.request_finished("no such reason", 1, 0, 1, 0.1)
    assert samples(metrics)["quantkit:request_success_total{finished_reason=error}"] == 1


def test_names_of_vllm_are_there_only_when_asked_for() -> None:
    assert not any(name.startswith("vllm:") for name in families(make()))
    both = make(vllm_names=True)
    both.token_gap(0.002)
    assert {name for name in families(both) if name.startswith("vllm:")} == VLLM
    guessing = families(make(info=GUESSING, vllm_names=True))
    assert {name for name in guessing if name.startswith("vllm:")} == VLLM | VLLM_GUESSES
    found = samples(both)
    for name, value in found.items():
        if name.startswith("vllm:") and "gpu_cache" not in name and "time_per_output" not in name:
            assert found["quantkit:" + name.removeprefix("vllm:")] == value
    assert found["vllm:time_per_output_token_seconds_count"] == 1
    assert found["vllm:gpu_cache_usage_perc"] == pytest.approx(0.4)


def test_two_servers_in_a_process_do_not_share_numbers() -> None:
    first, second = make(), make()
    first.request_started()
    assert samples(second)["quantkit:requests_total"] == 0


def test_labels_are_escaped() -> None:
    metrics = make(model_name='a"b\\c\nd')
    (family,) = [
        f for f in text_string_to_metric_families(metrics.render()[0].decode()) if f.name == "quantkit:build_info"
    ]
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'
    assert family.samples[0].labels["format"] == "nf4"


def test_snapshot_of_an_idle_server() -> None:
    assert make().snapshot() == {
        "tokens_per_second": 0.0,
        "ttft_ms_p50": None,
        "itl_ms_p50": None,
        "running": 2,
        "waiting": 3,
        "kv_percent": 40.0,
        "prefix_hit_percent": 25.0,
        "requests_total": 0,
        "restarts": 0,
    }


def test_snapshot_looks_at_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    metrics = make(shadow=lambda: {"kl": 0.01, "model": "small"})
    for _ in range(10):  # ten seconds with 20 tokens a second
        metrics.first_token(0.1)
        for _ in range(19):
            now[0] += 0.05
            metrics.token_gap(0.02)
        now[0] += 0.05
    live = metrics.snapshot()
    assert live["tokens_per_second"] == pytest.approx(20, abs=0.5)
    assert (live["ttft_ms_p50"], live["itl_ms_p50"]) == (100.0, 20.0)
    assert live["shadow"] == {"kl": 0.01, "model": "small"}
    assert samples(metrics)["quantkit:shadow{number=kl}"] == 0.01
    now[0] += 7
    assert metrics.snapshot()["tokens_per_second"] == 0.0
    now[0] += 60
    assert metrics.snapshot()["itl_ms_p50"] is None


def test_counting_a_token_is_cheap() -> None:
    """At 10,000 tokens per second, 20 us each would be a fifth of a core; a quiet machine takes 3."""
    metrics = make()
    best = min(_timed(metrics) for _ in range(5))
    assert best < 20e-6


def _timed(metrics: ServerMetrics, count: int = 1000) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        metrics.token_gap(0.002)
    return (time.perf_counter() - begin) / count


def sample_names() -> set[str]:
    """Every name that a query can ask for, also where no sample was counted yet."""
    metrics = make(info=GUESSING, shadow=lambda: {"kl": 0.1})
    metrics.request_refused(429)
    metrics.request_routed("auto", "first")
    gpus = GpuWatch(lambda: FakeNvml(FakeGpu("GPU-0")))
    gpus.start()
    gpus.close()
    own = {sample.name for family in gpus.collect() for sample in family.samples}
    return {name.partition("{")[0] for name in samples(metrics)} | own


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    asked = {name for expression in expressions for name in re.findall(r"quantkit:\w+", expression)}
    assert all("quantkit:" in expression for expression in expressions)
    assert asked <= sample_names()
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert shown == {re.sub(r"_(bucket|sum|count)$", "", name) for name in sample_names()}, "a metric has no panel"


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {each["name"] for each in dashboard["templating"]["list"]} == {"datasource", "model"}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_guide_lists_every_metric() -> None:
    guide = (ROOT / "docs" / "reference" / "serving.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(quantkit:\w+)", guide, flags=re.MULTILINE))
    assert listed == {re.sub(r"_(bucket|sum|count)$", "", name) for name in sample_names()}
