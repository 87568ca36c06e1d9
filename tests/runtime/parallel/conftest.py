"""Ranks that are forked: real processes, without the seconds in which each imports torch."""

import multiprocessing
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest

from quantkit.runtime.parallel.launcher import Job, LocalWorkers
from quantkit.runtime.parallel.rank_process import run_worker


class _Forked:
    """Of a `Popen`, what a launcher uses. Several threads ask, but only one of them can read how a process ended."""

    def __init__(self, process: ForkServerProcess) -> None:
        process.start()
        self.pid = process.pid
        self.kill = process.kill
        self._process = process
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        with self._asking:
            self._process.join(timeout)
            if (code := self._process.exitcode) is None:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            return code


class ForkedWorkers(LocalWorkers):
    """Starts ranks from a process that has imported what they need; watches and ends them as `LocalWorkers` does."""

    def __init__(self, forks: ForkServerContext) -> None:
        super().__init__()
        self._forks = forks

    def start(self, jobs: Sequence[Job]) -> None:
        processes: dict[int, Any] = self._processes
        for job in jobs:
            given = (job.ranks, job.address, job.model, job.options)
            processes[job.ranks.rank] = _Forked(self._forks.Process(target=run_worker, args=given, daemon=True))
            self._errors[job.ranks.rank] = tempfile.TemporaryFile()  # noqa: SIM115  (as theirs)


@pytest.fixture(scope="session")
def forked_workers() -> Callable[[], LocalWorkers]:
    """`forked_workers()`: a launcher, for what does not ask how a rank is started. Others use `LocalWorkers`."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["pytest", "quantkit.runtime.parallel.rank_process"])
    return lambda: ForkedWorkers(forks)
