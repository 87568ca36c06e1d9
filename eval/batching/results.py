"""Rows of `quantkit bench batching`, one for each way, and the CSV file that keeps them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.eval.batching.drive import MixedRun, PrefixRun
from quantkit.eval.batching.run import Batching, median_ms, same_answers
from quantkit.eval.engine import csv_file
from quantkit.eval.engine.results import Started
from quantkit.eval.kernels.results import versions

FILE = Path("eval") / "results" / "batching.csv"
COLUMNS = (
    *("date", "gpu", "quantkit", "torch", "triton", "model", "format", "dtype", "kv_dtype"),
    *("way", "load", "seed", "batch", "max_context", "kv_tokens", "rounds"),
    *("requests", "prompt_tokens", "output_tokens", "same_answers"),
    *("seconds", "tokens_per_second", "steps", "requests_mean", "requests_most", "preemptions"),  # of mixed loads
    *("filled_percent", "cache_percent"),
    *("first_token_ms_p50", "computed_prompt_tokens"),  # of prefixes
)


@dataclass(frozen=True)
class BatchingResult:
    started: Started
    max_context: int
    found: Batching

    def rows(self) -> list[dict[str, Any]]:
        return [
            *(self._shared() | self._mixed(run) for run in self.found.mixed),
            *(self._shared() | self._prefix(run) for run in self.found.prefixes),
        ]

    def to_dict(self) -> dict[str, Any]:
        ratios = {name: round(value, 3) for name, value in self.found.ratios.items()}
        return {"rows": self.rows(), "ratios": ratios, "stages_s": self.started.stages}

    def _shared(self) -> dict[str, Any]:
        started, plan = self.started, self.found.plan
        same = {name: getattr(started, name) for name in ("model", "format", "dtype", "kv_dtype", "kv_tokens")}
        return same | {
            "seed": plan.load.seed,
            "batch": plan.places,
            "max_context": self.max_context,
            "rounds": plan.rounds,
        }

    def _mixed(self, run: MixedRun) -> dict[str, Any]:
        load = self.found.plan.load
        return {
            "way": run.way.name,
            "load": load.source,
            "requests": len(load.requests),
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": sum(map(len, run.answers)),
            "same_answers": same_answers(run, self.found.mixed[0]),
            "seconds": round(run.seconds, 3),
            "tokens_per_second": round(run.tokens_per_second, 1),
            "steps": run.steps,
            "requests_mean": round(run.mean_at_once, 2),
            "requests_most": run.most_at_once,
            "preemptions": run.preemptions,
            "filled_percent": round(run.use.filled_percent, 2),
            "cache_percent": round(run.use.cache_percent, 2),
        }

    def _prefix(self, run: PrefixRun) -> dict[str, Any]:
        load = self.found.plan.prefixes
        return {
            "way": run.name,
            "load": f"{load.prefix} in common + {load.own}",
            "requests": load.requests,
            "prompt_tokens": load.requests * (load.prefix + load.own),
            "output_tokens": sum(map(len, run.answers)),
            "same_answers": same_answers(run, self.found.prefixes[0]),
            "first_token_ms_p50": round(median_ms(run), 2),
            "computed_prompt_tokens": run.computed,
        }


def append(path: Path, device: str, result: BatchingResult) -> None:
    fixed = {"date": datetime.date.today().isoformat(), "gpu": device, **versions()}
    for row in result.rows():
        csv_file.append(path, COLUMNS, fixed | row)
