"""Times of kernels and the limits they are held against, both measured in the same run.

On a GPU: CUDA graph replays. One graph calls every copy of the data in turn, and there are enough copies that the
second-level cache holds none of what the next call reads. On a CPU: the wall clock, caches warm.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.kernels.linear.cpu.slabs import product_dtype

Call = Callable[[], object]

FEWEST_CALLS = 8  # in one graph, so that launching the graph itself does not count
MOST_COPIES = 256  # tiny weights stay in the cache
LARGEST_SUM = 2 << 30  # bytes read to measure the memory
SIDE = 8192  # of the square matrices multiplied to measure the matrix units


@dataclass(frozen=True)
class Times:
    """Microseconds of one call over all repeats."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Limits:
    """What this device does at best: bytes per second, and 16-bit operations per second."""

    bandwidth: float
    rate: float

    def seconds(self, moved: float, operations: float, rate_factor: int = 1) -> tuple[float, str]:
        """The shortest possible time, and which of the two limits sets it."""
        memory, compute = moved / self.bandwidth, operations / (self.rate * rate_factor)
        return max(memory, compute), "memory" if memory >= compute else "compute"

    def percent(self, moved: float, operations: float, rate_factor: int, microseconds: float) -> float:
        return 100 * self.seconds(moved, operations, rate_factor)[0] / (microseconds * 1e-6)


class Clock(ABC):
    """Times calls on one device."""

    device: torch.device
    repeat: int

    @abstractmethod
    def time(self, calls: Sequence[Call], *, capture: bool = True) -> Times:
        """One call's time, `calls` run in turn; `capture` False for those that a CUDA graph cannot hold."""

    @abstractmethod
    def copies(self, size: int) -> int:
        """How many copies of data of this many bytes leave the cache cold."""

    @abstractmethod
    def describe(self) -> str:
        """The device, as the results name it."""

    @abstractmethod
    def limits(self, dtype: str) -> Limits:
        """Measured now."""

    def _limits(self, dtype: str, summed: int, side: int) -> Limits:
        values = torch.rand(summed // 4, device=self.device)
        reading = self.time([values.sum]).median
        del values
        left, right = (torch.randn(side, side, device=self.device).to(getattr(torch, dtype)) for _ in range(2))
        multiplying = self.time([lambda: left @ right]).median
        return Limits(summed / (reading * 1e-6), 2 * side**3 / (multiplying * 1e-6))


class GpuClock(Clock):
    def __init__(self, device: torch.device, repeat: int | None = None) -> None:
        self.device = device
        self.repeat = repeat or 20
        self.properties = torch.cuda.get_device_properties(device)

    def time(self, calls: Sequence[Call], *, capture: bool = True) -> Times:
        turns = list(calls) * math.ceil(FEWEST_CALLS / len(calls))
        for call in calls:  # compiles, loads, allocates
            call()
        torch.cuda.synchronize()
        replay = self._captured(turns) if capture else lambda: _run(turns)
        replay()
        times = []
        for _ in range(self.repeat):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(turns))
        return spread(times)

    def _captured(self, turns: Sequence[Call]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                _run(turns)
        finally:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream behind
        replay: Callable[[], None] = graph.replay
        return replay

    def copies(self, size: int) -> int:
        cache: int = self.properties.L2_cache_size
        return min(MOST_COPIES, max(1, math.ceil(2 * cache / size)) + 1)

    def describe(self) -> str:
        return str(self.properties.name)

    def limits(self, dtype: str) -> Limits:
        return self._limits(dtype, min(LARGEST_SUM, self.properties.total_memory // 8), SIDE)


class CpuClock(Clock):
    def __init__(self, repeat: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.repeat = repeat or 5

    def time(self, calls: Sequence[Call], *, capture: bool = True) -> Times:
        _run(calls)
        times = []
        for _ in range(self.repeat):
            began = time.perf_counter()
            _run(calls)
            times.append((time.perf_counter() - began) * 1e6 / len(calls))
        return spread(times)

    def copies(self, size: int) -> int:
        return 1

    def describe(self) -> str:
        return "cpu"

    def limits(self, dtype: str) -> Limits:
        """Of products as the runtime computes them: in float32 where this CPU has no instructions for 16 bits."""
        return self._limits(str(product_dtype(getattr(torch, dtype)))[6:], 64 << 20, 512)


def clock_for(device: str, repeat: int | None = None) -> Clock:
    return CpuClock(repeat) if device == "cpu" else GpuClock(torch.device(device), repeat)


def spread(times: Sequence[float]) -> Times:
    """Median and quantiles, linear between neighbours."""
    values = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    median, p20, p80 = values.tolist()
    return Times(median, p20, p80)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
