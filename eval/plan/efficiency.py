"""How much longer than its ceiling the engine takes: a few constants, fitted to measured rows.

A step is predicted as a sum, where a ceiling is a maximum, since a real engine overlaps little of it:

    layers x overhead + bytes of weights / bandwidth x w + bytes of cache / bandwidth x c + operations / rate x d

and prompts as the same with a constant of their own for their operations, in steps of STEP_TOKENS. `w` is one number
for a layout of weights (kernels differ), `c` one for the bits of a cache, the others are one for a kind of arithmetic;
models with experts have a set of their own. None is below 1: nothing is faster than a data sheet.

The constants are those of least relative error over rows of eval/results/engine.csv. A row names its source. A weak
pull (PULL) to what is typical keeps a layout with few rows from running away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal, NamedTuple

import torch

from quantkit.eval.plan.gpus import GPUS, Gpu
from quantkit.eval.plan.measured import Case, Row, ceiling_of, known_rows
from quantkit.eval.plan.memory import STEP_TOKENS
from quantkit.eval.plan.roofline import Ceiling, mean_context
from quantkit.eval.plan.weights import UNQUANTIZED

PULL = 0.1  # of a constant to its typical value: weighs as much as a hundredth of a row
What = Literal["overhead", "weights", "experts", "cache", "decode", "prompt"]
# Seconds of a layer, then multiples of the data sheet's time.
TYPICAL: dict[What, float] = {
    "overhead": 25e-6, "weights": 1.8, "experts": 1.6, "cache": 1.1, "decode": 1.5, "prompt": 1.6,
}  # fmt: skip


class Part(NamedTuple):
    """One summand, and whose constant it has."""

    what: What
    of: str  # a layout of weights, a kind of arithmetic, a cache of fewer bits, or nothing
    routed: bool  # of a model with experts


Work = dict[Part, float]  # layers, then seconds at the data sheet's rates


def step_work(ceiling: Ceiling, batch: int, context: int, rows: int | None = None) -> Work:
    """Of one step of decoding; with guesses it has more `rows` than requests."""
    rows = batch if rows is None else rows
    bandwidth = ceiling.gpu.bandwidth
    part = _Parts(ceiling)
    return part.reading(1, rows) | {
        part("cache", part.cache): batch * ceiling.cache_bytes(context) / bandwidth,
        part("decode", part.arithmetic): rows * ceiling.token_seconds(context),
    }


def prompt_work(ceiling: Ceiling, prompt: int, batch: int) -> Work:
    """Of whole prompts that come together."""
    part = _Parts(ceiling)
    steps = -(-batch * prompt // STEP_TOKENS)
    return part.reading(steps, batch * prompt / steps) | {
        part("prompt", part.arithmetic): ceiling.prompt_compute_seconds(prompt, batch)
    }


class _Parts:
    """The parts of one model in one format."""

    def __init__(self, ceiling: Ceiling) -> None:
        self._ceiling, weights = ceiling, ceiling.weights
        weight_only = weights.arithmetic == "bf16" and weights.name != UNQUANTIZED
        self.arithmetic = "weight-only" if weight_only else weights.arithmetic
        self.cache = "" if ceiling.cache_itemsize >= 2 else "8 bits" if ceiling.cache_itemsize >= 1 else "4 bits"

    def __call__(self, what: What, of: str = "") -> Part:
        return Part(what, of, bool(self._ceiling.weights.routed))

    def reading(self, steps: int, tokens: float) -> Work:
        """What every step does, however few tokens it has: launches, and reading the weights."""
        weights, bandwidth = self._ceiling.weights, self._ceiling.gpu.bandwidth
        chosen = weights.read_for(tokens) - weights.read
        return {
            self("overhead"): steps * self._ceiling.cache.layers,
            self("weights", weights.scheme): steps * weights.read / bandwidth,
            **({self("experts", weights.scheme): steps * chosen / bandwidth} if weights.routed else {}),
        }


@dataclass(frozen=True)
class Efficiency:
    """Constants, and what they rest on."""

    constants: Mapping[Part, float]
    rows: tuple[Row, ...] = ()  # they were fitted to
    share: float | None = None  # of the ceiling, instead of all of them: the user's --efficiency

    def step_seconds(self, ceiling: Ceiling, batch: int, context: int, rows: int | None = None) -> float:
        """Of decoding; `rows` as for `step_work`."""
        if self.share is not None:
            computed = (batch if rows is None else rows) * ceiling.token_seconds(context)
            return max(ceiling.decode(batch, context).seconds, computed) / self.share
        return self._seconds(step_work(ceiling, batch, context, rows))

    def prompt_seconds(self, ceiling: Ceiling, prompt: int, batch: int) -> float:
        if self.share is not None:
            return ceiling.prefill_seconds(prompt, batch) / self.share
        return self._seconds(prompt_work(ceiling, prompt, batch))

    def answer_tokens_per_second(self, ceiling: Ceiling, batch: int, prompt: int, new: int) -> float:
        """As `Ceiling.answer_tokens_per_second`."""
        steps = (new - 1) * self.step_seconds(ceiling, batch, mean_context(prompt, new)) if new > 1 else 0.0
        return batch * new / (self.prompt_seconds(ceiling, prompt, batch) + steps)

    def constant(self, part: Part) -> float:
        """Of a layout that was not measured, the median of those that were."""
        if part in self.constants:
            return self.constants[part]
        alike = [value for known, value in self.constants.items() if known[::2] == part[::2]]
        return median(alike) if alike else TYPICAL[part.what]

    def _seconds(self, work: Work) -> float:
        return sum(amount * self.constant(part) for part, amount in work.items())


def fit(rows: Sequence[Row]) -> Efficiency:
    """To the step of every row, and to its prompts."""
    equations: list[tuple[Work, float]] = []
    for row in rows:
        case, ceiling = row.case, ceiling_of(row.case)
        if row.step is not None:
            # a step that was timed is the median one: half of its answer is there
            equations.append((step_work(ceiling, case.batch, mean_context(case.prompt, case.new)), row.step))
        equations.append((prompt_work(ceiling, case.prompt, case.batch), row.prompts))
    return Efficiency(_solve(equations), tuple(rows))


def _solve(equations: Iterable[tuple[Work, float]]) -> dict[Part, float]:
    """Least relative error, none below its bound: the one that is furthest below stays there, and the rest is solved
    again. Constants are told in units of their typical value, so that the pull is the same for all."""
    given = list(equations)
    parts = sorted({part for work, _ in given for part in work})
    if not parts:
        return {}
    typical = torch.tensor([TYPICAL[part.what] for part in parts], dtype=torch.float64)
    least = torch.tensor([0.0 if part.what == "overhead" else 1.0 for part in parts], dtype=torch.float64) / typical
    table = torch.tensor([[work.get(part, 0.0) / took for part in parts] for work, took in given], dtype=torch.float64)
    table = torch.cat([table * typical, PULL * torch.eye(len(parts), dtype=torch.float64)])
    wanted = torch.cat([torch.ones(len(given)), torch.full((len(parts),), PULL)]).double()
    values, free = least.clone(), torch.ones(len(parts), dtype=torch.bool)
    while free.any():
        rest = wanted - table[:, ~free] @ values[~free]
        found = torch.linalg.lstsq(table[:, free], rest).solution
        below = found - least[free]
        if (below >= 0).all():
            values[free] = found
            break
        free[free.nonzero()[below.argmin()]] = False
    return dict(zip(parts, (values * typical).tolist(), strict=True))


@dataclass(frozen=True)
class Evidence:
    """What a prediction for one format on one GPU rests on."""

    measured: bool  # whether rows of that GPU and layout were among those that were fitted
    rows: tuple[Row, ...]
    words: str

    def to_dict(self) -> dict[str, object]:
        return {"measured": self.measured, "words": self.words, "rows": [row.title for row in self.rows]}


def efficiency_on(gpu: Gpu, *, routed: bool, leave_out: frozenset[Case] = frozenset()) -> Efficiency:
    """Fitted to rows of that GPU; of another one, as shares of its data sheet, where there are none."""
    return _efficiency_on(gpu.name, routed, leave_out)


@cache
def _efficiency_on(gpu: str, routed: bool, leave_out: frozenset[Case]) -> Efficiency:
    known = known_rows(routed=routed)
    rows = [row for row in known if row.case not in leave_out]
    here = [row for row in rows if row.case.gpu == gpu]
    return fit(here or rows)


def evidence_for(efficiency: Efficiency, ceiling: Ceiling) -> Evidence:
    """Which rows speak of the layout on the GPU, or what is assumed instead."""
    if efficiency.share is not None:
        return Evidence(False, (), f"assumed: {efficiency.share:g} of the ceiling, the --efficiency that was given")
    gpu, scheme = ceiling.gpu, ceiling.weights.scheme
    alike = tuple(row for row in efficiency.rows if ceiling_of(row.case).weights.scheme == scheme)
    here = tuple(row for row in alike if row.case.gpu == gpu.name)
    if here:
        return Evidence(True, here, f"measured: {_listed(here)}")
    if not efficiency.rows:
        return Evidence(False, (), "assumed: typical constants, since there are no rows")
    others = ", ".join(dict.fromkeys(GPUS[row.case.gpu].title for row in efficiency.rows))
    if any(row.case.gpu == gpu.name for row in efficiency.rows):
        return Evidence(False, (), f"assumed: the median of other layouts on the {gpu.title}; none was {scheme}")
    layout = "of this layout" if alike else "of other layouts"
    return Evidence(
        False, alike, f"assumed: the {others}'s shares of its data sheet, {layout}, where nothing was measured"
    )


def _listed(rows: Sequence[Row]) -> str:
    """Such as `engine.csv 2026-11-18 llama-3.1-8b w4 at 1, 8, 32, 256`: one piece for a model and a day."""
    pieces: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        pieces.setdefault((row.date, row.case.model, row.case.format), []).append(row.case.batch)
    words = (f"{' '.join(what)} at {', '.join(map(str, sorted(set(of))))}" for what, of in pieces.items())
    return f"engine.csv {'; '.join(words)}"
