"""What `quantkit bench step` found, and the CSV file that keeps it: a row for each kernel, and two for idle time."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.eval.engine import csv_file
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.step_profile import StepTable
from quantkit.eval.kernels.results import versions

FILE = Path("eval") / "results" / "step.csv"
COLUMNS = (
    *("date", "gpu", "quantkit", "torch", "triton", "model", "format", "dtype", "kv_dtype", "batch", "context"),
    *("kernel", "launches", "us", "percent", "gap_before_us"),
    *("steps", "step_us", "unprofiled_us", "tokens_per_second"),
    *("read_bytes", "bandwidth_tb_s", "limit_us", "percent_of_limit"),
)
GAPS, BETWEEN = "gaps between kernels", "between steps"


@dataclass(frozen=True)
class StepResult:
    started: Started
    table: StepTable
    batch: int
    context: int  # tokens of each request in the middle of the steps
    unprofiled_us: float  # a step by the host's clock, the median
    read_bytes: float  # weights and contexts, once
    bandwidth: float | None  # bytes a second

    @property
    def limit_us(self) -> float | None:
        return None if self.bandwidth is None else self.read_bytes / self.bandwidth * 1e6

    def rows(self) -> list[dict[str, Any]]:
        """Percentages add up to 100."""
        table = self.table
        rows = [
            {
                "kernel": kernel.name,
                "launches": kernel.launches,
                "us": round(kernel.us, 2),
                "percent": round(table.percent(kernel.us), 2),
                "gap_before_us": round(kernel.gap_us, 2),
            }
            for kernel in table.kernels
        ]
        for name, us in ((GAPS, table.gaps_us), (BETWEEN, table.between_us)):
            percent = round(table.percent(us), 2)
            rows.append({"kernel": name, "launches": None, "us": round(us, 2), "percent": percent,
                         "gap_before_us": None})  # fmt: skip
        return rows

    def step(self) -> dict[str, Any]:
        """What is the same for all rows."""
        table, limit, started = self.table, self.limit_us, self.started
        return {
            "model": started.model,
            "format": started.format,
            "dtype": started.dtype,
            "kv_dtype": started.kv_dtype,
            "batch": self.batch,
            "context": self.context,
            "steps": table.steps,
            "step_us": round(table.us, 2),
            "unprofiled_us": round(self.unprofiled_us, 2),
            "tokens_per_second": round(self.batch / table.us * 1e6, 1),
            "read_bytes": round(self.read_bytes),
            "bandwidth_tb_s": None if self.bandwidth is None else round(self.bandwidth / 1e12, 3),
            "limit_us": None if limit is None else round(limit, 2),
            "percent_of_limit": None if limit is None else round(100 * limit / table.us, 1),
        }

    def to_dict(self) -> dict[str, Any]:
        table = self.table
        return self.step() | {
            "steps_alike": table.alike,
            "steps_seen": table.seen,
            "launches": table.launches,
            "rows": self.rows(),
        }


def append(path: Path, device: str, result: StepResult) -> None:
    fixed = {"date": datetime.date.today().isoformat(), "gpu": device, **versions()} | result.step()
    for row in result.rows():
        csv_file.append(path, COLUMNS, fixed | row)
