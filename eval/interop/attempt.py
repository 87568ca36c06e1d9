"""Many checkpoints in one engine, in a process beside this one: it may die or hang, and the next has its turn.

A process takes one checkpoint after the other, because starting an engine takes longer than a small model does. It is
replaced when it is no longer as good as new, when it has died, and when a checkpoint takes longer than the limit: that
says nothing about loading, as some packages are slow on some machines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.eval.interop.adapters import find_adapter
from quantkit.eval.interop.compare import Seen, token_windows, try_checkpoint
from quantkit.eval.interop.parent import end_with

_POLL = 0.1  # seconds
_OURS_FAILED = 70  # exit code: we failed, which says nothing about the engine


@dataclass(frozen=True)
class Setting:
    """How checkpoints are tried."""

    engine: str
    device: str
    windows: int
    window: int
    limit: float  # seconds for a checkpoint, and for the start of a process

    def command(self, report: Path, folders: Sequence[Path]) -> list[str]:
        words = [sys.executable, "-m", __name__, "--engine", self.engine, "--device", self.device]
        words += ["--windows", str(self.windows), "--window", str(self.window), "--report", str(report)]
        words += ["--parent", str(os.getpid())]
        return [*words, *map(str, folders)]


def attempt_all(setting: Setting, folders: Sequence[Path], log: Path) -> Iterator[tuple[Path, Seen]]:
    """What became of each, as soon as it is known. What engines print goes to `log`."""
    left = list(folders)
    while left:
        for folder, seen in _one_process(setting, tuple(left), log):
            left.remove(folder)
            yield folder, seen


def _one_process(setting: Setting, folders: tuple[Path, ...], log: Path) -> Iterator[tuple[Path, Seen]]:
    """Until it ends; one that ends without an answer has failed on the first folder that has none."""
    answered = 0
    with log.open("ab") as printed, tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.jsonl")  # of this process alone
        report.touch()
        worker = subprocess.Popen(
            setting.command(report, folders), stdout=printed, stderr=printed, start_new_session=True
        )
        last = time.monotonic()
        try:
            while True:
                ended = worker.poll() is not None
                for line in report.read_text(encoding="utf-8").splitlines()[answered:]:
                    yield folders[answered], _read_line(line, folders[answered])
                    answered, last = answered + 1, time.monotonic()
                if ended:
                    break
                if time.monotonic() - last > setting.limit:
                    yield folders[answered], Seen(None, f"no answer within {setting.limit:g} s")
                    return
                time.sleep(_POLL)
        finally:
            _end(worker)
    if worker.returncode == _OURS_FAILED:
        yield folders[answered], Seen(None, f"our own part failed: {_last_line(log)}")
    elif answered == 0 or (answered < len(folders) and worker.returncode):
        yield folders[answered], Seen(False, f"the process ended with code {worker.returncode}: {_last_line(log)}")


def _write_line(report: Path, folder: Path, seen: Seen) -> None:
    with report.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"folder": str(folder), "seen": seen.to_dict()}) + "\n")


def _read_line(line: str, folder: Path) -> Seen:
    found = json.loads(line)
    if found["folder"] != str(folder):
        raise QuantkitError(f"an answer about {found['folder']} came where one about {folder} was due")
    return Seen(**found["seen"])


def _end(worker: subprocess.Popen[bytes]) -> None:
    """With the processes that it started, which would hold memory of the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")


def main(arguments: Sequence[str] | None = None) -> None:
    """The other process: one line of JSON for every folder, and an early end where something is left behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("folders", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    end_with(given.parent)
    adapter = find_adapter(given.engine, given.device)
    for folder in given.folders:
        checkpoint = Checkpoint(folder)
        ids = token_windows(checkpoint, given.windows, given.window)
        seen = try_checkpoint(adapter, checkpoint, ids, given.device)
        _write_line(given.report, folder, seen)
        if not adapter.forget():
            return


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(_OURS_FAILED)
    os._exit(0)  # whatever an engine does when Python ends comes after the last answer, and may fail or hang
