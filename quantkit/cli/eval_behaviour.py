"""`quantkit eval --behaviour`: measures, prints what came out, and is a gate where one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import print_json, print_table, progress_bar
from quantkit.errors import QuantkitError
from quantkit.extras import require

if TYPE_CHECKING:
    from quantkit.eval.behaviour.results import BehaviourResult, MeasureResult


def evaluate_behaviour(
    model: str,
    base: str | None,
    *,
    behaviour_prompts: Path | None,
    behaviour_samples: int | None,
    behaviour_tokens: int | None,
    behaviour_gate: bool,
    chat_template: bool,
    engine: dict[str, Any],
    as_json: bool,
) -> None:
    """Shares of answers, as a table or as JSON. With a gate, what is worse than `base` is an error after the table."""
    require("quantkit eval --behaviour", "serve")
    from quantkit.eval.behaviour.measure import measure_behaviour

    given: dict[str, Any] = {"prompts": behaviour_prompts, "samples": behaviour_samples, "max_tokens": behaviour_tokens}
    chosen = {name: value for name, value in given.items() if value is not None}
    result = measure_behaviour(model, base, **chosen, need_template=chat_template, bar=progress_bar, **engine)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    if behaviour_gate and result.worse:
        raise QuantkitError(f"worse than {base}, the share of answers that {'; '.join(result.worse)}")


def _print(result: BehaviourResult) -> None:
    from quantkit.eval.behaviour.results import INTERVALS

    columns = ["answers that", "prompts", result.model]
    columns += [result.base, "difference", "verdict"] if result.base else []
    rows = [_row(one, result.base is not None) for one in result.measures]
    print_table(f"{result.model}: behaviour", columns, rows)
    if result.same_answers is not None:
        same, place = result.same_answers, result.same_answers.first_difference
        others = "" if place is None else f"; the others differ from token {place} on (median)"
        click.echo(f"the same as {result.base}'s, token by token: {same.share.text('.1%')} of answers{others}")
    if result.failures:
        click.echo(f"the engine gave up on {len(result.failures)} answers, which do not end: {result.failures[0]}")
    click.echo(f"{INTERVALS}\n{result.protocol}")


def _row(one: MeasureResult, with_base: bool) -> tuple[str, ...]:
    if one.share is None:
        why = f"not measured: {one.not_measured}"
        return (one.label, "0", "", "", "", why) if with_base else (one.label, "0", why)
    row = (one.label, str(one.prompts), one.share.text(".1%"))
    if one.base_share is None or one.difference is None or one.verdict is None:
        return row
    return *row, one.base_share.text(".1%"), one.difference.text("+.1%"), one.verdict
