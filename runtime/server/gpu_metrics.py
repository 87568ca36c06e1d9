"""What the GPUs do: utilization, memory, power and temperature, asked of NVIDIA's management library (NVML).

A thread asks every two seconds, so that no scrape waits for a driver; numbers that nobody renews go away rather than
stand still. Without the package, the driver or a GPU there are no such metrics, and nothing else changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quantkit.runtime.server.engine_metrics import PREFIX

SAMPLE_SECONDS = 2.0
STALE_SECONDS = 15.0  # a driver that hangs this long has no newest numbers
_CLOSE_SECONDS = 1.0
_log = logging.getLogger("quantkit.server")
_FAMILIES = {  # field of a reading -> its metric
    "utilization": ("gpu_utilization", "Share of time in which a kernel ran, 0 to 1."),
    "memory_used": ("gpu_memory_used_bytes", "Memory in use, by whomever."),
    "memory_total": ("gpu_memory_total_bytes", "Memory."),
    "power_watts": ("gpu_power_watts", "Power drawn."),
    "power_limit_watts": ("gpu_power_limit_watts", "Power that may be drawn."),
    "temperature": ("gpu_temperature_celsius", "Temperature of the chip."),
}
Nvml = Any  # the module `pynvml`, which has no types


@dataclass(frozen=True)
class GpuReading:
    """One GPU, or one of its MIG instances; None for what it does not tell."""

    index: int | None  # as nvidia-smi counts
    uuid: str
    name: str
    utilization: float | None
    memory_used: int | None
    memory_total: int | None
    power_watts: float | None  # of the whole GPU, as is the temperature
    power_limit_watts: float | None
    temperature: int | None


def find_nvml() -> Nvml | None:
    """The library, ready to be asked; None where it has nothing to say."""
    try:
        import pynvml
    except ImportError:
        _log.debug("no GPU metrics: the package nvidia-ml-py is not installed")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("no GPU metrics: %s", error)
        return None
    return pynvml


class GpuWatch(Collector):
    """`visible` is CUDA_VISIBLE_DEVICES, None where it is not set: what the engines cannot see is not shown."""

    def __init__(
        self,
        find: Callable[[], Nvml | None] = find_nvml,
        visible: str | None = None,
        *,
        sample_seconds: float = SAMPLE_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._find, self._visible = find, visible
        self._sample_seconds, self._stale_seconds = sample_seconds, stale_seconds
        self._newest: tuple[float, list[GpuReading]] = (0.0, [])  # when, what
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Returns at once: even finding the library may take seconds where the driver sleeps."""
        self._thread = threading.Thread(target=self._run, name="gpu metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)  # a driver that hangs is not waited for

    @property
    def readings(self) -> list[GpuReading]:
        """The newest, unless they are old."""
        when, found = self._newest
        return found if time.monotonic() - when < self._stale_seconds else []

    def snapshot(self) -> list[dict[str, Any]]:
        """For people."""
        return [asdict(reading) for reading in self.readings]

    def collect(self) -> Iterator[Metric]:
        readings = self.readings
        for field, (name, text) in _FAMILIES.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["gpu", "uuid", "name"])
            for reading in readings:
                value = getattr(reading, field)
                if value is not None:
                    family.add_metric([str(reading.index), reading.uuid, reading.name], value)
            if family.samples:
                yield family

    def _run(self) -> None:
        nvml = self._find()
        if nvml is None:
            return
        gpus = visible_gpus(nvml, self._visible)
        while gpus:
            found = [_read(nvml, gpu) for gpu in gpus]
            self._newest = time.monotonic(), [reading for reading in found if reading is not None]
            if self._ended.wait(self._sample_seconds):
                break
        _ask(nvml, "nvmlShutdown")


def visible_gpus(nvml: Nvml, visible: str | None) -> list[Any]:
    """Handles of the GPUs that CUDA sees, by number or the beginning of a UUID; of those that are cut, MIG instances.

    As in CUDA, a wrong entry hides all that follow.
    """
    gpus = [_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0)]
    chosen = list(gpus) if visible is None else []
    named = [(_ask(nvml, "nvmlDeviceGetUUID", one), one) for gpu in gpus for one in (gpu, *_instances(nvml, gpu))]
    for entry in (visible or "").replace(" ", "").split(","):
        if entry.isdecimal():
            found = gpus[int(entry) : int(entry) + 1]
        else:
            found = [one for uuid, one in named if entry and uuid is not None and uuid.startswith(entry)]
        if len(found) != 1:
            break
        chosen += found
    return [one for gpu in chosen for one in _instances(nvml, gpu) or [gpu]]


def _instances(nvml: Nvml, gpu: Any) -> list[Any]:
    """The MIG instances of a GPU; none where it is whole."""
    mode = _ask(nvml, "nvmlDeviceGetMigMode", gpu)
    if mode is None or not mode[0]:
        return []
    most = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", gpu) or 0
    found = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, index) for index in range(most))
    return [instance for instance in found if instance is not None]


def _read(nvml: Nvml, gpu: Any) -> GpuReading | None:
    """None for a GPU that is gone."""
    uuid = _ask(nvml, "nvmlDeviceGetUUID", gpu)
    if uuid is None:
        return None
    board = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", gpu) or gpu
    rates, memory = _ask(nvml, "nvmlDeviceGetUtilizationRates", gpu), _ask(nvml, "nvmlDeviceGetMemoryInfo", gpu)
    power, limit = _ask(nvml, "nvmlDeviceGetPowerUsage", board), _ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", board)
    return GpuReading(
        index=_ask(nvml, "nvmlDeviceGetIndex", board),
        uuid=uuid,
        name=_ask(nvml, "nvmlDeviceGetName", gpu) or "",
        utilization=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        power_watts=None if power is None else power / 1000,
        power_limit_watts=None if limit is None else limit / 1000,
        temperature=_ask(nvml, "nvmlDeviceGetTemperature", board, nvml.NVML_TEMPERATURE_GPU),
    )


def _ask(nvml: Nvml, name: str, *arguments: Any) -> Any:
    """None where this GPU does not answer that, as a MIG instance does not say what it draws."""
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None
