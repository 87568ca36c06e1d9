"""Measures one format in a process of its own: `python -m quantkit.eval.compare.worker JOB.json`.

A process for each format gives every one a fresh device and an honest start, and one that crashes takes no other with
it. Results are saved after every part. Progress goes to standard output, a line of JSON each: [item, items in all].
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.devices import on_device
from quantkit.errors import QuantkitError
from quantkit.eval.compare.asked import Asked, Entry
from quantkit.eval.compare.parts import Bench, parts_of
from quantkit.eval.compare.results import FormatResult
from quantkit.eval.compare.store import Store
from quantkit.eval.quality.predictors import Predictor
from quantkit.progress import Progress

_SECONDS_BETWEEN_LINES = 0.1


@dataclass(frozen=True)
class Job:
    """What the process is to do."""

    asked: Asked
    entry: Entry
    output: str
    key: str
    file: str  # of the result

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"asked": self.asked.to_dict()}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Job:
        return cls(**(given | {"asked": Asked.from_dict(given["asked"]), "entry": Entry(**given["entry"])}))


def print_line(item: str, total: int) -> None:
    print(json.dumps([item, total]), flush=True)


class _Teller:
    """Progress of the running part, not more often than anybody reads."""

    def __init__(self, tell: Progress) -> None:
        self.part = ""
        self._tell = tell
        self._last = 0.0

    def __call__(self, item: str, total: int) -> None:
        if time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._tell(f"{self.part}: {item}", total)


def work(job: Job, tell: Progress = print_line, bases: dict[str, Predictor] | None = None) -> FormatResult:
    """Every part that is missing. What goes wrong is part of the result. `bases`: see `Bench`."""
    store, asked, entry = Store(Path(job.file), job.key), job.asked, job.entry
    fresh = FormatResult(entry.name, "", entry.kind == "baseline")
    result = replace(store.read() or fresh, error=None)
    teller = _Teller(tell)
    bench = Bench(asked, entry, Path(job.output), on_item=teller, bases=bases)
    for part in parts_of(asked, entry):
        if part.done(result):
            continue
        teller.part = part.name
        tell(part.name, 0)
        try:
            result = part.run(bench, result)
        except QuantkitError as error:
            result = replace(result, error=f"{part.name}: {error}")
        except Exception as error:  # a bug, or a device that ran out of memory: the others go on
            Path(job.file).with_suffix(".log").write_text(traceback.format_exc(), encoding="utf-8")
            first = (str(error).strip().splitlines() or [""])[0]
            result = replace(result, error=f"{part.name}: {type(error).__name__}: {first}")
        store.write(result)
        if result.error:
            break
    return result


if __name__ == "__main__":
    given = Job.from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    with on_device(given.asked.device):
        work(given)
