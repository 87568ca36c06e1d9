"""What other engines did with our checkpoints when somebody ran them: rows of interop.csv and gguf.csv in eval/results.

The files travel with the package, so that a verdict can say what it rests on. `python -m quantkit.eval.interop`,
docs/reference/interop.md and docs/reference/gguf.md have the rest.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).with_name("eval") / "results" / "interop.csv"
_TYPE = re.compile(r"\d+ x (\w+)")  # as gguf.csv counts tensors
GGUF_RESULTS = RESULTS.with_name("gguf.csv")
AGREES = 0.05  # perplexities may differ by this share: engines round activations in their own ways


@dataclass(frozen=True)
class Run:
    """One engine given one checkpoint."""

    engine: str
    version: str
    date: str
    checkpoint: str
    layout: str
    loads: bool
    reason: str  # why not
    perplexity_there: float | None
    perplexity_here: float | None
    model: str = ""  # that the checkpoint was made of

    @property
    def works(self) -> bool:
        """Whether it loaded and computed what the checkpoint means; some load a layout and read it wrong."""
        if not self.loads or self.perplexity_there is None or self.perplexity_here is None:
            return False
        return abs(self.perplexity_there / self.perplexity_here - 1) <= AGREES

    @classmethod
    def of_row(cls, row: dict[str, str]) -> Run:
        there, here = (float(row[name]) if row[name] else None for name in ("perplexity_there", "perplexity_here"))
        return cls(
            engine=row["engine"],
            version=row["version"],
            date=row["date"],
            checkpoint=row["checkpoint"],
            layout=row["layout"],
            loads=row["loads"] == "yes",
            reason=row["reason"],
            perplexity_there=there,
            perplexity_here=here,
            model=row["model"],
        )


def read_runs(path: Path = RESULTS) -> list[Run]:
    """By date, as they stand in the file on one day; none where it is missing, as in a package built without it.

    One that nobody waited for is no evidence.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        answered = [Run.of_row(row) for row in csv.DictReader(file) if row["loads"] in ("yes", "no")]
    return sorted(answered, key=lambda run: run.date)


def newest(runs: list[Run]) -> list[Run]:
    """The last one of every engine and checkpoint of a model."""
    return list({(run.engine, run.model, run.checkpoint): run for run in runs}.values())


def read_gguf_runs(path: Path = GGUF_RESULTS) -> list[Run]:
    """llama.cpp on files that quantkit wrote, by date; a layout is the types of their blocks."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return sorted((_gguf_run(row) for row in csv.DictReader(file)), key=lambda run: run.date)


def _gguf_run(row: dict[str, str]) -> Run:
    engine, _, version = row["engine"].partition(" ")
    there, here = float(row["perplexity_there"]), float(row["perplexity_here"])
    return Run(engine, version.partition(" ")[0], row["date"], row["file"], row["types"], True, "", there, here)


def run_of_blocks(engine: str, types: frozenset[str]) -> Run | None:
    """The newest run of an engine with a file that has blocks of all these types."""
    runs = [run for run in _gguf_runs() if run.engine == engine and types <= set(_TYPE.findall(run.layout))]
    return runs[-1] if runs else None


def run_of_layout(engine: str, layout: str) -> Run | None:
    """The newest run of an engine with a layout."""
    return _by_layout().get((engine, layout))


@cache
def _gguf_runs() -> tuple[Run, ...]:
    return tuple(read_gguf_runs())


@cache
def _by_layout() -> dict[tuple[str, str], Run]:
    return {(run.engine, run.layout): run for run in read_runs()}
