"""What recipes lost where somebody measured it: the rows of eval/results/recipe_quality.csv, part of the package.

One comparison of one small model, which loses more than large ones do: the order of recipes is what they are good for.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "recipe_quality.csv"


@dataclass(frozen=True)
class Loss:
    """Against the unquantized model, on held-out text."""

    recipe: str
    kl: float  # nats per token
    perplexity_ratio: float
    model: str
    date: str

    @property
    def source(self) -> str:
        return f"recipe_quality.csv {self.date} {self.model} {self.recipe}"


@cache
def known_losses(path: Path = RESULTS) -> dict[str, Loss]:
    """By recipe; none where the file is missing."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = (
        Loss(row["recipe"], float(row["kl"]), float(row["perplexity_ratio"]), row["model"], row["date"]) for row in rows
    )
    return {loss.recipe: loss for loss in losses}
