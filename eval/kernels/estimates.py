"""What it costs that nobody measured: the choice of `kernels/linear/cost.py` against the fastest of all candidates.

    python -m quantkit.eval.kernels.estimates --format w4,nf4 --shape llama-3.1-8b,qwen2.5-7b --output estimates.csv

For a GPU whose table is known, it also says what the table's choice takes. One row a layer and number of tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from quantkit.eval.engine.csv_file import append
from quantkit.eval.kernels.cases import FORMATS, MODELS, UNQUANTIZED
from quantkit.kernels.card import card_of
from quantkit.kernels.linear import op
from quantkit.kernels.linear.dispatch import choose, to_entry
from quantkit.kernels.linear.tuning import cold_copies, microseconds
from quantkit.kernels.linear.weight import Choice, LinearWeight

_REPEATS = 5


@dataclass(frozen=True)
class Estimate:
    """Microseconds, and choices as tables spell them."""

    device: str
    format: str
    outputs: int
    inputs: int
    tokens: int
    candidates: int
    estimated: str
    estimated_us: float
    table: str
    table_us: float
    fastest: str
    fastest_us: float

    @property
    def ratio(self) -> float:
        return self.estimated_us / self.fastest_us


@torch.no_grad()
def measure(formats: Sequence[str], shapes: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Estimate]:
    for name in formats:
        for shape in shapes:
            weight = _weight(name, shape, device)
            if weight is None:
                continue
            copies = cold_copies(weight)
            for tokens in weight.buckets:
                yield _estimate(name, weight, copies, tokens)
            del weight, copies
            torch.cuda.empty_cache()


def _weight(name: str, shape: tuple[int, int], device: torch.device) -> LinearWeight | None:
    dense = 0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16)
    if name == UNQUANTIZED:
        return op.prepare_plain(dense)
    fmt = FORMATS[name]("bfloat16")
    return op.prepare(fmt, fmt.quantize(dense.float()))


def _estimate(name: str, weight: LinearWeight, copies: Sequence[LinearWeight], tokens: int) -> Estimate:
    x = torch.randn(tokens, weight.inputs, device=weight.device, dtype=torch.bfloat16)
    estimated, measured = choose(weight, tokens, {}), choose(weight, tokens)
    times: dict[str, float] = {}
    for choice in (estimated, measured, *weight.candidates(tokens)):
        entry = json.dumps(to_entry(choice))
        if entry not in times:
            times[entry] = _time(choice, x, copies)
    spelled = [json.dumps(to_entry(choice)) for choice in (estimated, measured)]
    spelled.append(min(times, key=lambda entry: times[entry]))
    timed = [value for entry in spelled for value in (entry, round(times[entry], 2))]
    where = card_of(weight.device).name
    return Estimate(where, name, weight.outputs, weight.inputs, tokens, len(times), *timed)  # type: ignore[arg-type]


def _time(choice: Choice, x: torch.Tensor, copies: Sequence[LinearWeight]) -> float:
    def call(weight: LinearWeight) -> Callable[[], Any]:
        return lambda: op.run(choice, x, weight)

    try:
        return microseconds([call(weight) for weight in copies], _REPEATS)
    except Exception:  # does not fit this GPU
        torch.cuda.synchronize()
        return float("inf")


def summary(rows: Sequence[Estimate]) -> str:
    """Of every format and number of tokens: how much slower than the fastest, on average and at worst."""
    lines = [
        "| format | tokens | layers | estimated / fastest | at worst | table / fastest |",
        "|---|---|---|---|---|---|",
    ]
    for name, tokens in dict.fromkeys((row.format, row.tokens) for row in rows):
        alike = [row for row in rows if (row.format, row.tokens) == (name, tokens)]
        mean, worst = geometric_mean(row.ratio for row in alike), max(row.ratio for row in alike)
        table = geometric_mean(row.table_us / row.fastest_us for row in alike)
        lines.append(f"| {name} | {tokens} | {len(alike)} | {mean:.2f} | {worst:.2f} | {table:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m quantkit.eval.kernels.estimates")
    parser.add_argument("--format", default="w4,nf4,llm-int8,fp8,bf16", metavar="F,...")
    parser.add_argument("--shape", default="llama-3.1-8b,qwen2.5-7b,llama-3.2-1b", metavar="MODEL,...")
    parser.add_argument("--output", type=Path, metavar="FILE")
    given = parser.parse_args()
    shapes = [layer for model in given.shape.split(",") for layer in MODELS[model].layers.values()]
    rows = []
    for row in measure(given.format.split(","), shapes, torch.device("cuda", torch.cuda.current_device())):
        rows.append(row)
        if given.output:
            append(given.output, [field.name for field in fields(Estimate)], asdict(row))
    print(summary(rows))


if __name__ == "__main__":
    main()
