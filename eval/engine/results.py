"""Rows of `quantkit bench engine`, and the CSV file that keeps them with their machine, versions and date."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.eval.engine import csv_file
from quantkit.eval.engine.run import EngineTimes
from quantkit.eval.kernels.results import versions

FILE = Path("eval") / "results" / "engine.csv"
COLUMNS = (
    *("date", "gpu", "quantkit", "torch", "triton", "model", "format", "dtype", "kv_dtype"),
    *("batch", "prompt", "new", "tokens_per_second", "ttft_ms_median", "ttft_ms_max"),
    *("gap_ms_p50", "gap_ms_p95", "gap_ms_p99", "step_ms", "percent_of_limit"),
    *("weights_bytes", "kv_tokens", "peak_bytes", "ready_s", "process_to_first_token_s"),
    *("speculative", "tokens_per_step", "acceptance"),  # nothing in rows from before, and where nothing is guessed
    *("outliers", "held", "cache_percent"),  # nothing in rows from before; outliers: of `--outliers` alone
)


@dataclass(frozen=True)
class Started:
    """What is the same for all loads of one engine."""

    model: str
    format: str
    dtype: str
    kv_dtype: str
    stages: dict[str, float]  # seconds
    process_to_first_token: float | None  # seconds
    weights: int
    kv_tokens: int
    speculative: str | None = None  # as --speculative said it
    outliers: str | None = None  # as --outliers said it
    micro_batches: int = 1  # steps on their way through the stages at once, where there are several

    @property
    def ready(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class EngineRow:
    started: Started
    times: EngineTimes
    peak: int  # bytes

    def to_dict(self) -> dict[str, Any]:
        started, times = self.started, self.times
        first = started.process_to_first_token
        limit = times.percent_of_limit
        per_step, acceptance = times.guesses.tokens_per_step, times.guesses.acceptance
        return {
            "model": started.model,
            "format": started.format,
            "dtype": started.dtype,
            "kv_dtype": started.kv_dtype,
            "batch": times.load.batch,
            "prompt": times.load.prompt,
            "new": times.load.new,
            "tokens_per_second": round(times.tokens_per_second, 1),
            "ttft_ms_median": round(times.first_token_ms[0], 2),
            "ttft_ms_max": round(times.first_token_ms[1], 2),
            "gap_ms_p50": round(times.gap_ms[0], 3),
            "gap_ms_p95": round(times.gap_ms[1], 3),
            "gap_ms_p99": round(times.gap_ms[2], 3),
            "step_ms": round(times.step_ms, 3),
            "percent_of_limit": None if limit is None else round(limit, 1),
            "weights_bytes": started.weights,
            "kv_tokens": started.kv_tokens,
            "peak_bytes": self.peak,
            "ready_s": round(started.ready, 2),
            "process_to_first_token_s": None if first is None else round(first, 2),
            "speculative": started.speculative,
            "tokens_per_step": None if per_step is None else round(per_step, 3),
            "acceptance": None if acceptance is None else round(acceptance, 4),
            "outliers": started.outliers,
            "held": times.held,
            "cache_percent": round(100 * times.cache_used, 1),
        }


def append(path: Path, device: str, row: EngineRow) -> None:
    """One row at a time, so that an interrupted run loses nothing."""
    fixed = {"date": datetime.date.today().isoformat(), "gpu": device, **versions()}
    csv_file.append(path, COLUMNS, fixed | row.to_dict())
