"""What GPUs do: values of the library as metrics, of those that CUDA sees, and no fuss where there is none to ask."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fake_nvml import FakeGpu, FakeNvml
from quantkit.runtime.server.gpu_metrics import GpuWatch, find_nvml, visible_gpus

PLAIN = FakeGpu("GPU-aaaa-0")
COLD = FakeGpu("GPU-aabb-1", busy=0, used=1 << 30, milliwatts=None, celsius=30)
SLICES = [FakeGpu("MIG-cccc-0", "NVIDIA H200 MIG 1g.18gb", total=18 << 30, used=2 << 30), FakeGpu("MIG-dddd-1")]
CUT = FakeGpu("GPU-cccc-2", mig=SLICES)


def series(watch: GpuWatch) -> dict[tuple[str, str], float]:
    """(metric without prefix, UUID) -> value."""
    families = text_string_to_metric_families(generate_latest(watch).decode())
    return {
        (sample.name.removeprefix("quantkit:gpu_"), sample.labels["uuid"]): sample.value
        for family in families
        for sample in family.samples
    }


def eventually(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def watching(nvml: FakeNvml | None, visible: str | None = None, **options: Any) -> Iterator[GpuWatch]:
    watch = GpuWatch(lambda: nvml, visible, sample_seconds=0.01, **options)
    watch.start()
    yield watch
    watch.close()


def test_what_the_library_says_is_in_the_metrics() -> None:
    nvml = FakeNvml(PLAIN, COLD)
    with watching(nvml) as watch:
        eventually(lambda: series(watch))
        found = series(watch)
    assert {name: value for (name, uuid), value in found.items() if uuid == PLAIN.uuid} == {
        "utilization": 0.87,
        "memory_used_bytes": 70 << 30,
        "memory_total_bytes": 140 << 30,
        "power_watts": 512.25,
        "power_limit_watts": 700.0,
        "temperature_celsius": 61.0,
    }
    assert found["temperature_celsius", COLD.uuid] == 30.0
    assert ("power_watts", COLD.uuid) not in found  # which it does not tell
    assert [(one["index"], one["name"]) for one in watch.snapshot()] == [(0, "NVIDIA H200"), (1, "NVIDIA H200")]
    assert nvml.shut_down == 1


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [PLAIN, COLD, *SLICES]),
        ("", []),
        ("1", [COLD]),
        ("1, 0", [COLD, PLAIN]),
        ("2", SLICES),  # a GPU that is cut is its instances
        ("GPU-aaaa", [PLAIN]),
        ("GPU-cccc-2", SLICES),
        ("MIG-dddd", SLICES[1:]),
        ("0,-1,1", [PLAIN]),
        ("0,9,1", [PLAIN]),
        ("GPU-aa,1", []),  # the beginning of two
        ("NoDevFiles", []),
    ],
)
def test_the_gpus_that_cuda_sees(visible: str | None, seen: list[FakeGpu]) -> None:
    assert visible_gpus(FakeNvml(PLAIN, COLD, CUT), visible) == seen


def test_an_instance_has_its_memory_and_the_power_of_its_gpu() -> None:
    with watching(FakeNvml(PLAIN, CUT), "MIG-cccc") as watch:
        eventually(lambda: watch.readings)
        (found,) = watch.readings
    assert (found.index, found.uuid, found.name) == (1, "MIG-cccc-0", "NVIDIA H200 MIG 1g.18gb")
    assert (found.memory_total, found.power_watts, found.temperature) == (18 << 30, 512.25, 61)
    assert found.utilization is None


def test_a_gpu_that_is_lost_has_no_numbers_and_the_others_go_on() -> None:
    nvml = FakeNvml(PLAIN, COLD)
    with watching(nvml) as watch:
        eventually(lambda: len(watch.readings) == 2)
        nvml.lost.append(PLAIN)
        eventually(lambda: [one.uuid for one in watch.readings] == [COLD.uuid])


def test_a_driver_that_hangs_stops_no_scrape_and_its_numbers_go() -> None:
    nvml, go_on = FakeNvml(PLAIN), threading.Event()
    with watching(nvml, stale_seconds=0.2) as watch:
        eventually(lambda: watch.readings)
        nvml.wait = lambda: go_on.wait(10)
        began = time.monotonic()
        eventually(lambda: not series(watch))
        assert time.monotonic() - began < 5
        go_on.set()
        eventually(lambda: watch.readings)


def test_a_server_shows_them_beside_its_models(start_server: Callable[..., Any]) -> None:
    server = start_server(also={"served_model_name": ["other"]}, gpus=FakeNvml(PLAIN))
    eventually(lambda: server.ask("GET", "/page/status").json["gpus"])
    text = server.ask("GET", "/metrics").content.decode()
    assert 'quantkit:gpu_temperature_celsius{gpu="0",name="NVIDIA H200",uuid="GPU-aaaa-0"} 61.0' in text
    assert text.count("quantkit:gpu_power_watts{") == 1  # not one for each model


def test_no_gpu_no_metrics_and_one_quiet_line(live_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The real package, where there is no driver; with one it answers."""
    pynvml = pytest.importorskip("pynvml")
    with caplog.at_level(logging.DEBUG, "quantkit.server"):
        found = find_nvml()
    if found is not None:
        assert pynvml.nvmlDeviceGetCount() >= 0
    else:
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "quantkit:gpu" not in live_server.ask("GET", "/metrics").content.decode()
    assert live_server.ask("GET", "/page/status").json["gpus"] == []


def test_without_the_package_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.DEBUG, "quantkit.server"):
        assert find_nvml() is None
    assert "nvidia-ml-py" in caplog.text


@pytest.mark.gpu
def test_the_real_library_on_a_real_gpu() -> None:
    with watching(find_nvml()) as watch:
        eventually(lambda: watch.readings)
        found = watch.readings[0]
    assert found.memory_total is not None
    assert found.memory_total > 1 << 30
    assert found.temperature is not None
    assert 0 < found.temperature < 120
