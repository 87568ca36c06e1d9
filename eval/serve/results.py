"""What a load's answers say together: rates, percentiles, errors. One row of a table, of JSON, of the CSV file."""

from __future__ import annotations

import csv
import datetime
from collections import Counter
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, StorageError
from quantkit.eval.serve.answers import Answer
from quantkit.eval.serve.facts import Facts
from quantkit.eval.serve.loads import Limits
from quantkit.eval.serve.percentiles import Spread
from quantkit.eval.serve.run import Measured

FILE = Path("eval") / "results" / "serve.csv"
TIMES = ("ttft", "tpot", "itl", "e2e")
MARKS = tuple(field.name for field in fields(Spread))
COLUMNS = (
    *("date", "quantkit", "server", "device", "model", "format", "endpoint", "concurrency", "rate", "ramp_up_s"),
    *("requests", "whole", "errors", "prompt_tokens", "output_tokens", "seconds"),
    *("output_tokens_per_second", "total_tokens_per_second", "requests_per_second"),
    *(f"{time}_ms_{mark}" for time in TIMES for mark in MARKS),
    *("goodput_limits", "goodput_percent", "goodput_per_second", "client_percent"),
)
_BUSY_CLIENT = 80  # percent of a core: beyond this, times may be the client's


@dataclass(frozen=True)
class ServeRow:
    """One load at one server. Only whole answers count for times, tokens and rates."""

    facts: Facts
    endpoint: str
    new_tokens: int  # at least asked for
    limits: Limits | None
    measured: Measured

    @property
    def whole(self) -> list[Answer]:
        return [answer for answer in self.measured.answers if answer.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """How many of each kind, the most frequent first."""
        kinds = Counter(answer.error for answer in self.measured.answers if answer.error is not None)
        return dict(kinds.most_common())

    @property
    def error_examples(self) -> dict[str, str]:
        """One message of each kind."""
        return {answer.error: answer.message for answer in reversed(self.measured.answers) if answer.error}

    @property
    def good(self) -> int | None:
        """Answers within the limits."""
        if self.limits is None:
            return None
        return sum(self.limits.keeps(answer) for answer in self.measured.answers)

    def spread(self, time: str) -> Spread | None:
        return Spread.of_seconds(self.times(time))

    def times(self, time: str) -> list[float]:
        """Seconds: one for each answer, or for `itl` every gap of every answer."""
        if time == "itl":
            return [gap for answer in self.whole for gap in answer.gaps]
        found = (getattr(answer, time) for answer in self.whole)
        return [value for value in found if value is not None]

    def per_second(self, count: float) -> float:
        return count / self.measured.seconds if self.measured.seconds > 0 else 0.0

    @property
    def client_percent(self) -> float:
        return 100 * self.measured.client_share

    def to_dict(self) -> dict[str, Any]:
        load, whole, asked = self.measured.load, self.whole, len(self.measured.answers)
        output, prompt = sum(answer.tokens for answer in whole), sum(answer.prompt_tokens or 0 for answer in whole)
        spreads = {time: self.spread(time) for time in TIMES}
        return {
            **{name: getattr(self.facts, name) for name in ("server", "device", "model", "format")},
            "endpoint": self.endpoint,
            "concurrency": load.concurrency,
            "rate": load.rate,
            "ramp_up_s": load.ramp_up,
            "requests": asked,
            "whole": len(whole),
            "errors": self.errors,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "token_events": sum(len(answer.stamps) for answer in whole),
            "answers_with_usage": sum(answer.output_tokens is not None for answer in whole),
            "seconds": round(self.measured.seconds, 3),
            "output_tokens_per_second": round(self.per_second(output), 1),
            "total_tokens_per_second": round(self.per_second(output + prompt), 1),
            "requests_per_second": round(self.per_second(len(whole)), 3),
            **{f"{time}_ms": _rounded(spread) for time, spread in spreads.items()},
            "goodput": self._goodput(asked),
            "client_percent": round(self.client_percent, 1),
            "notes": self.notes(),
        }

    def _goodput(self, asked: int) -> dict[str, Any] | None:
        if self.limits is None or self.good is None:
            return None
        limits = {name: limit for name, limit in asdict(self.limits).items() if limit is not None}
        percent = round(100 * self.good / asked, 1) if asked else 0.0
        return {"limits_ms": limits, "percent": percent, "per_second": round(self.per_second(self.good), 3)}

    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        whole, name = self.whole, self.measured.load.name
        found = [f"{name}: {kind}: {message}" for kind, message in self.error_examples.items() if message]
        without = sum(answer.output_tokens is None for answer in whole)
        if without:
            found.append(f"{name}: {without} answers came without usage; their events are counted as tokens")
        tokens, events = sum(answer.tokens for answer in whole), sum(len(answer.stamps) for answer in whole)
        if tokens != events:
            found.append(f"{name}: {tokens} tokens came in {events} events; gaps are between events")
        short = sum(answer.tokens < self.new_tokens for answer in whole)
        if short:
            found.append(f"{name}: {short} of {len(whole)} answers have fewer than {self.new_tokens} tokens")
        if self.client_percent > _BUSY_CLIENT:
            found.append(f"{name}: this client was busy {self.client_percent:.0f} % of the time; times may be its own")
        return found

    def to_csv(self) -> dict[str, Any]:
        row = self.to_dict()
        good = row["goodput"] or {}
        row |= {f"{time}_ms_{mark}": (row[f"{time}_ms"] or {}).get(mark) for time in TIMES for mark in MARKS}
        row["errors"] = _pairs(row["errors"])
        row |= {"goodput_limits": _pairs(good.get("limits_ms", {})), "goodput_percent": good.get("percent")}
        row["goodput_per_second"] = good.get("per_second")
        row |= {"date": datetime.date.today().isoformat(), "quantkit": _quantkit_version()}
        return {name: row[name] for name in COLUMNS}


def results_path(output: Path | None, save: bool) -> Path | None:
    """--output, else the results of the checkout that this is run in, else nowhere. Checks an existing file first."""
    if not save:
        if output is not None:
            raise InputError("--output names a file and --no-save forbids one; give one of them")
        return None
    path = output or (FILE if FILE.parent.is_dir() and Path("pyproject.toml").is_file() else None)
    if path is not None and path.is_file() and path.stat().st_size:
        with path.open(encoding="utf-8", newline="") as file:
            if tuple(next(csv.reader(file), ())) != COLUMNS:
                raise StorageError(f"{path} has other columns than this version writes; choose another --output")
    return path


def append(path: Path, row: ServeRow) -> None:
    """One row at a time, so that an interrupted run loses nothing."""
    try:
        fresh = not path.exists() or path.stat().st_size == 0
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row.to_csv())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def _rounded(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {mark: round(value, 3) for mark, value in asdict(spread).items()}


def _pairs(counts: dict[str, Any]) -> str:
    return "; ".join(f"{name}={value:g}" for name, value in counts.items())


def _quantkit_version() -> str:
    try:
        return version("quantkit")
    except PackageNotFoundError:
        return ""
