"""A library in the shape of `pynvml`, for machines without a GPU: values go in, and calls answer as NVML's do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As `pynvml.NVMLError`: every call that a GPU does not know raises one."""


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H200"
    busy: int = 87  # percent
    used: int = 70 << 30
    total: int = 140 << 30
    milliwatts: int | None = 512_250
    celsius: int = 61
    mig: list["FakeGpu"] = field(default_factory=list)
    parent: "FakeGpu | None" = None

    def __post_init__(self) -> None:
        for instance in self.mig:
            instance.parent = self


class FakeNvml:
    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.lost: list[FakeGpu] = []  # that fell off the bus
        self.wait: Callable[[], Any] = lambda: None  # called before every answer
        self.shut_down = 0

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self.gpus.index(gpu)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        if gpu in self.lost:
            raise NVMLError("GPU is lost")
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.name

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        return [int(bool(_whole(gpu).mig)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        if index >= len(gpu.mig):
            raise NVMLError("Not Found")
        return gpu.mig[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu:  # noqa: N802
        if gpu.parent is None:
            raise NVMLError("Invalid Argument")
        return gpu.parent

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        self.wait()
        return SimpleNamespace(gpu=_whole(gpu).busy, memory=12)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        if _whole(gpu).milliwatts is None:
            raise NVMLError("Not Supported")
        assert gpu.milliwatts is not None
        return gpu.milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:  # noqa: N802
        _whole(gpu)
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return _whole(gpu).celsius


def _whole(gpu: FakeGpu) -> FakeGpu:
    """What is asked of whole GPUs only."""
    if gpu.parent is not None:
        raise NVMLError("Not Supported")
    return gpu
