"""Who starts the other ranks. `LocalWorkers` starts processes on this machine; others may start them elsewhere, as long
as each calls `run_worker` of `rank_process.py` with its job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Protocol

import torch

from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.ranks import Ranks

STOP_SECONDS = 2.0  # for a rank to leave by itself


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens. The token keeps strangers out."""

    host: str
    port: int
    token: str


@dataclass(frozen=True)
class Job:
    """What `run_worker` takes."""

    ranks: Ranks
    address: Address
    model: str
    options: EngineOptions

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        given = json.loads(text)
        options = EngineOptions(**given["options"])
        return cls(Ranks(**given["ranks"]), Address(**given["address"]), given["model"], options)


class Launcher(Protocol):
    """Starts ranks 1 and up. Rank 0 is the process that asks."""

    @property
    def host(self) -> str:
        """Of this process, as workers reach it."""

    @property
    def devices(self) -> int | None:
        """GPUs that ranks can have, rank 0 included; None where that is not known here."""

    def start(self, jobs: Sequence[Job]) -> None:
        """Returns at once."""

    def check(self) -> dict[int, str]:
        """Why ranks have ended, of those that have."""

    def stop(self) -> None:
        """Ends all that still run; returns when none does."""


class LocalWorkers:
    """Processes on this machine. Rank r has the GPU r of those that are visible; on a CPU they share its cores."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._errors: dict[int, IO[bytes]] = {}  # what they wrote to stderr
        self._reasons: dict[int, str] = {}
        self._asking = threading.Lock()  # each rank's listener asks, and what they wrote is closed at the end

    @property
    def devices(self) -> int | None:
        return torch.cuda.device_count()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.options.torch_device.type == "cuda":
                job = replace(job, options=replace(job.options, device=f"cuda:{job.ranks.rank}"))
            threads = str(max(1, torch.get_num_threads() // job.ranks.world))
            errors = tempfile.TemporaryFile()  # noqa: SIM115  (read when it dies)
            process = subprocess.Popen(
                [sys.executable, "-m", "quantkit.runtime.parallel.rank_process"],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": threads},
            )
            self._processes[job.ranks.rank], self._errors[job.ranks.rank] = process, errors
            assert process.stdin is not None
            try:
                process.stdin.write(job.to_json().encode())  # not an argument: others may read those
                process.stdin.close()
            except BrokenPipeError:  # it died at once; `check` says why
                pass

    def check(self) -> dict[int, str]:
        with self._asking:
            for rank, process in self._processes.items():
                code = process.poll()
                if code is not None and rank not in self._reasons:
                    self._reasons[rank] = self._reason(rank, code)
            return dict(self._reasons)

    def stop(self) -> None:
        end = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.check()
        with self._asking:
            for errors in self._errors.values():
                errors.close()

    def _reason(self, rank: int, code: int) -> str:
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        errors = self._errors[rank]
        errors.seek(0)
        lines = errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote no reason")
        return f"exit code {code}, {last}"
