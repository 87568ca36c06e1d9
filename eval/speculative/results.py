"""Rows of `quantkit bench speculative`: what was measured, what theory says, and the CSV file that keeps them."""

from __future__ import annotations

import datetime
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.eval.compare.machine import describe_machine
from quantkit.eval.engine import csv_file
from quantkit.eval.engine.results import Started
from quantkit.eval.kernels.results import versions
from quantkit.eval.speculative.decode import Rounds

FILE = Path("eval") / "results" / "speculative.csv"
COLUMNS = (
    *("date", "machine", "quantkit", "torch", "triton", "commit"),
    *("model", "format", "dtype", "kv_dtype", "speculative", "text", "temperature", "batch", "prompt", "new", "rounds"),
    *("k", "a", "a_measured", "guesses_per_step", "acceptance", "tokens_per_step"),
    *("plain_tokens_per_second", "tokens_per_second", "speed_up", "plain_spread_percent", "spread_percent"),
    *("plain_step_ms", "draft_step_ms", "cost_ratio", "formula", "percent_of_formula"),
)


@dataclass(frozen=True)
class Forced:
    """Guesses that were right by the throw of a coin, and what the draft costs without them."""

    k: int
    chance: float  # of the coin
    plain_step_ms: float
    draft_step_ms: float

    @property
    def cost_ratio(self) -> float:
        return self.draft_step_ms / self.plain_step_ms

    @property
    def formula(self) -> float:
        return expected_speed_up(self.chance, self.k, self.cost_ratio)


@dataclass(frozen=True)
class SpeculativeRow:
    """One way to decode one load. `found` is `plain` where nothing was guessed."""

    started: Started
    batch: int
    prompt: int
    new: int
    plain: Rounds
    found: Rounds
    text: str | None = None
    temperature: float | None = None
    forced: Forced | None = None

    @property
    def speed_up(self) -> float:
        return self.found.tokens_per_second / self.plain.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        started, guesses = self.started, self.found.guesses
        return {
            "model": started.model,
            "format": started.format,
            "dtype": started.dtype,
            "kv_dtype": started.kv_dtype,
            "speculative": started.speculative,
            "text": self.text,
            "temperature": self.temperature,
            "batch": self.batch,
            "prompt": self.prompt,
            "new": self.new,
            "rounds": len(self.found.runs),
            **self._forced(),
            "guesses_per_step": _rounded(guesses.per_step, 2),
            "acceptance": _rounded(guesses.acceptance, 4),
            "tokens_per_step": _rounded(guesses.tokens_per_step, 3),
            "plain_tokens_per_second": round(self.plain.tokens_per_second, 1),
            "tokens_per_second": round(self.found.tokens_per_second, 1),
            "speed_up": round(self.speed_up, 3),
            "plain_spread_percent": round(self.plain.spread_percent, 1),
            "spread_percent": round(self.found.spread_percent, 1),
        }

    def _forced(self) -> dict[str, Any]:
        if self.forced is None:
            return {}
        forced, guesses = self.forced, self.found.guesses
        return {
            "k": forced.k,
            "a": forced.chance,
            "a_measured": _rounded(chance_of(guesses.accepted / guesses.steps, forced.k) if guesses.steps else None, 4),
            "plain_step_ms": round(forced.plain_step_ms, 4),
            "draft_step_ms": round(forced.draft_step_ms, 4),
            "cost_ratio": round(forced.cost_ratio, 4),
            "formula": round(forced.formula, 3),
            "percent_of_formula": round(100 * self.speed_up / forced.formula, 1),
        }


def expected_speed_up(chance: float, guesses: int, cost_ratio: float) -> float:
    """(1 - a^(k+1)) / ((1 - a)(k c + 1)): tokens of a step with k guesses, over its cost in plain steps.

    Leviathan et al. 2023, theorem 3.8. Verifying is taken to cost no more than a plain step.
    """
    return (1 + accepted_length(chance, guesses)) / (guesses * cost_ratio + 1)


def accepted_length(chance: float, guesses: int) -> float:
    """Of k guesses, how many are right before the first wrong one, on average."""
    return sum(chance**count for count in range(1, guesses + 1))


def chance_of(length: float, guesses: int) -> float:
    """The chance of a single guess that gives this accepted length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_length(middle, guesses) < length else (low, middle)
    return (low + high) / 2


def append(path: Path, device: str, row: SpeculativeRow) -> None:
    fixed = {"date": datetime.date.today().isoformat(), "machine": describe_machine(device).device, **versions()}
    csv_file.append(path, COLUMNS, fixed | {"commit": commit()} | row.to_dict())


def commit() -> str:
    """Of the checkout that this code stands in, with a plus where files were changed since; empty without one."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
