"""The advice of a comparison: by its own rows, which say more about its model than any plan.

Formats that lose too much by the rules of the report are not recommended. Two speeds less than SAME_SPEED apart are a
tie, which the first of the recipes wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantkit.eval.advice.advice import GOALS, Advice, Change, Goal, Reason
from quantkit.eval.compare.results import Comparison, FormatResult, Speed
from quantkit.eval.report.rules import SAME_SPEED, Choice, divergence_of
from quantkit.wording import human_bytes

Cost = Callable[[FormatResult], float | None]  # what a goal wants least of; None: not measured


def advise_by_rows(comparison: Comparison, choice: Choice) -> tuple[Advice, ...]:
    """One for every goal that was measured, of formats that the report's rules accept."""
    able = [found for found in comparison.formats if found.name in choice.acceptable]
    return tuple(advice for goal in GOALS if (advice := _advice(comparison, able, goal)) is not None)


def _advice(comparison: Comparison, able: list[FormatResult], goal: Goal) -> Advice | None:
    cost = _COSTS[goal]
    known = [(value, found) for found in able if (value := cost(found)) is not None]
    if goal == "quality":
        known = [(value, found) for value, found in known if not found.baseline]  # the original loses nothing
    if not known:
        return None
    least = min(value for value, _ in known)
    margin = SAME_SPEED * abs(least) if goal in ("latency", "throughput") else 0.0
    best = next(found for value, found in known if value <= least + margin)
    others = sorted((one for one in known if one[1] is not best), key=lambda one: one[0])
    runner_up = others[0][1] if others else None
    figure = _figure(best, goal)
    because = figure if runner_up is None else f"{figure}, against {_figure(runner_up, goal)} of {runner_up.name}"
    words = "nothing else that is acceptable was measured" if runner_up is None else f"without it, {runner_up.name}"
    return Advice(
        model=comparison.model,
        goal=goal,
        format=best.name,
        reasons=(Reason("format", best.name, because, _source(comparison, best, goal)),),
        commands=tuple(line for line in best.commands if line.startswith("quantkit quantize ")),
        change=Change(runner_up.name if runner_up else None, words),
    )


def speed_of(found: FormatResult, goal: Goal) -> Speed | None:
    """At the fewest requests at once for latency, at the most for throughput."""
    speeds = sorted(found.running.speeds, key=lambda speed: speed.batch) if found.running else []
    return None if not speeds else speeds[0 if goal == "latency" else -1]


def _latency(found: FormatResult) -> float | None:
    """Milliseconds of an answer, its first token included."""
    speed = speed_of(found, "latency")
    return None if speed is None else speed.first_token_ms + (speed.new - 1) * speed.gap_ms


def _throughput(found: FormatResult) -> float | None:
    speed = speed_of(found, "throughput")
    return None if speed is None else -speed.tokens_per_second


def _memory(found: FormatResult) -> float | None:
    return None if found.size is None else found.size.bytes


def _quality(found: FormatResult) -> float | None:
    kl = divergence_of(found)
    return None if kl is None else kl.value


_COSTS: dict[Goal, Cost] = {
    "latency": _latency,
    "throughput": _throughput,
    "memory": _memory,
    "quality": _quality,
}


def _figure(found: FormatResult, goal: Goal) -> str:
    value = _COSTS[goal](found)
    assert value is not None
    spelled = {
        "latency": f"{value:,.0f} ms an answer",
        "throughput": f"{-value:,.0f} tokens/s",
        "memory": human_bytes(value),
        "quality": f"{value:.4f} nats lost",
    }
    return spelled[goal]


def _source(comparison: Comparison, found: FormatResult, goal: Goal) -> str:
    speed = speed_of(found, goal) if goal in ("latency", "throughput") else None
    load = "" if speed is None else f", {speed.batch} x ({speed.prompt} + {speed.new})"
    return f"this comparison: {found.name}{load}, {comparison.machine.device}, {comparison.date}"


def lines(advices: tuple[Advice, ...]) -> Iterator[tuple[str, str]]:
    """(goal and format, the rest) for people."""
    for advice in advices:
        reason = advice.reasons[0]
        yield f"{advice.goal}: {advice.format}", f"{reason.because} [{reason.source}]; {advice.change.words}"
