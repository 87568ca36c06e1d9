"""quantkit bench speculative"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quantkit.cli.common import device_option, json_option, print_json, print_table, progress_bar
from quantkit.cli.engine_options import KV_DTYPE
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.eval.speculative.results import SpeculativeRow
    from quantkit.eval.speculative.run import ForcedPlan, Load, TextPlan

_CHANCES, _GUESSES, _PROMPTS = "0.5,0.7,0.9", "4", 8
_OUTPUT = "CSV to append to; in a checkout: eval/results/speculative.csv."
_FORCED = {  # number -> title of its column
    "batch": "batch",
    "k": "k",
    "a": "a",
    "a_measured": "a measured",
    "acceptance": "guesses right %",
    "tokens_per_step": "tokens/step",
    "plain_tokens_per_second": "plain tokens/s",
    "tokens_per_second": "tokens/s",
    "speed_up": "speed-up",
    "formula": "formula",
    "percent_of_formula": "% of formula",
    "spread_percent": "spread %",
}
Number = TypeVar("Number", int, float)


@click.command("speculative", short_help="Time speculative decoding against plain decoding.")
@click.argument("model")
@click.option("--draft", metavar="MODEL", help="Guess with this model; guesses are right by chance (--acceptance).")
@click.option("--acceptance", metavar="A", help=f"Chances that a guess is right; default: {_CHANCES}.")
@click.option("--k", metavar="N", help=f"Guesses per step; default: {_GUESSES}.")
@click.option("--adaptive", is_flag=True, help="With --draft: up to k guesses, as many as pay; else always k.")
@click.option("--speculative", "ways", multiple=True, metavar="HOW", help="Real guesses instead; may be repeated.")
@click.option("--text", metavar="FILE", help="Text to cut prompts from; default: the held-out text that ships.")
@click.option("--temperature", type=float, metavar="T", help="Temperature of the answers; default: 0, greedy.")
@click.option("--prompts", type=click.IntRange(min=1), metavar="N", help=f"Prompts from the text; default: {_PROMPTS}.")
@click.option("--batch", default="1", show_default=True, metavar="N", help="Concurrent requests.")
@click.option("--prompt-len", default=128, show_default=True, type=click.IntRange(min=1), help="Tokens of a prompt.")
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(min=2), help="Tokens per answer.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=2), help="Rounds; their median counts.")
@device_option
@click.option("--dtype", help="Dtype of activations; default: the checkpoint's, on a CPU float32.")
@click.option("--kv-dtype", default="auto", show_default=True, help=KV_DTYPE)
@click.option("--memory-share", default=0.9, show_default=True, help="Share of the GPU's memory to use.")
@click.option("--output", type=Path, metavar="FILE", help=_OUTPUT)
@click.option("--no-save", is_flag=True, help="Do not append to a file.")
@json_option
def speculative_command(
    model: str,
    draft: str | None,
    ways: tuple[str, ...],
    batch: str,
    prompt_len: int,
    new_tokens: int,
    rounds: int,
    output: Path | None,
    no_save: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Time decoding with and without guesses. MODEL is a folder, a hub name, `demo`, or shape:NAME:FORMAT.

    \b
    quantkit bench speculative demo --speculative draft=demo-draft,k=4 --speculative ngram,k=8
    quantkit bench speculative demo --speculative draft=demo-draft,k=4 --text notes.txt --temperature 0.8
    quantkit bench speculative demo --draft demo-draft --acceptance 0.6,0.8 --k 2,4 --batch 1,4
    quantkit bench speculative shape:llama-3.1-8b:w4 --draft shape:llama-3.2-1b:w4 --batch 1,8
    quantkit bench speculative shape:llama-3.1-8b:w4 --draft shape:llama-3.2-1b:w4 --batch 128 --adaptive

    With --speculative, prompts and guesses are real. With --draft, each guess is right by a coin: that shows what
    speculation brings at each acceptance, beside the formula (1 - a^(k+1)) / ((1 - a)(k c + 1)), where c is the time
    of a step of the draft over one of the model, both measured. Prompts, loading and a first turn are not in the
    times; plain and speculative runs take turns, and the median of the rounds counts. Protocol:
    docs/performance/bench.md.
    """
    from quantkit.eval.engine.csv_file import results_path
    from quantkit.eval.speculative.results import COLUMNS, FILE
    from quantkit.eval.speculative.run import Load

    load = Load(_numbers("--batch", batch, int, 1), prompt_len, new_tokens, rounds)
    engine = {name: options.pop(name) for name in ("device", "dtype", "kv_dtype", "memory_share")}
    plan = _plan(model, draft, ways, load, **options)
    path = results_path(output, not no_save, FILE, COLUMNS)
    rows = _measure(plan, load, engine, path)
    if as_json:
        print_json({"rows": [row.to_dict() for row in rows]})
    elif draft is None:
        _print_text(rows, path)
    else:
        _print_forced(rows, path)


def _plan(
    model: str,
    draft: str | None,
    ways: tuple[str, ...],
    load: Load,
    acceptance: str | None,
    k: str | None,
    adaptive: bool,
    text: str | None,
    temperature: float | None,
    prompts: int | None,
) -> ForcedPlan | TextPlan:
    from quantkit.eval.speculative.run import HELDOUT, ForcedPlan, TextPlan

    if (draft is None) == (not ways):
        raise InputError("give --draft MODEL for guesses that are right by chance, or --speculative HOW for real ones")
    if draft is not None:
        _refuse("--speculative", {"--text": text, "--temperature": temperature, "--prompts": prompts})
        chances = _numbers("--acceptance", _CHANCES if acceptance is None else acceptance, float, 0, 1)
        return ForcedPlan(model, draft, _numbers("--k", k or _GUESSES, int, 1), chances, load, adaptive)
    _refuse("--draft", {"--acceptance": acceptance, "--k": k, "--adaptive": adaptive or None})
    chosen = HELDOUT if text is None else text
    if chosen != HELDOUT and not Path(chosen).is_file():
        raise InputError(f"no text '{chosen}'; give a UTF-8 text file, or '{HELDOUT}' for the one that ships")
    if not 0 <= (temperature or 0.0) < float("inf"):
        raise InputError(f"--temperature is {temperature}, but must be 0 or more")
    return TextPlan(model, ways, chosen, temperature or 0.0, prompts or _PROMPTS, load)


def _refuse(other: str, given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} goes with {other}, not with what was given; leave it out")


def _numbers(
    option: str, text: str, kind: Callable[[str], Number], least: float, most: float = float("inf")
) -> tuple[Number, ...]:
    try:
        found = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or not all(least <= number <= most for number in found):
        what = f"numbers from {least:g} to {most:g}" if most < float("inf") else f"whole numbers of {least:g} or more"
        raise InputError(f"{option} is '{text}', but must be {what}, separated by commas")
    return found


def _measure(
    plan: ForcedPlan | TextPlan, load: Load, options: dict[str, Any], path: Path | None
) -> list[SpeculativeRow]:
    from quantkit.eval.speculative import results
    from quantkit.eval.speculative.run import TextPlan, forced_rows, text_rows

    chosen = load.options(**options)
    made = text_rows(plan, chosen) if isinstance(plan, TextPlan) else forced_rows(plan, chosen)
    rows = []
    with progress_bar("speculative") as advance:
        for row in made:
            rows.append(row)
            if path is not None:
                results.append(path, str(chosen.torch_device), row)
            advance(f"{row.started.speculative or 'plain'} b{row.batch}", plan.rows)
    return rows


def _print_text(rows: Sequence[SpeculativeRow], path: Path | None) -> None:
    columns = ("", "batch", "guesses right %", "tokens/step", "tokens/s", "speed-up", "spread %")
    table = []
    for row in sorted(rows, key=lambda row: row.batch):
        cells = row.to_dict()
        numbers = [_percent(cells["acceptance"]), _shown(cells["tokens_per_step"]), cells["tokens_per_second"]]
        ends = (cells["speed_up"], cells["spread_percent"])
        table.append((cells["speculative"] or "plain", row.batch, *numbers, *ends))
    first = rows[0]
    greedy = "greedy" if not first.temperature else f"temperature {first.temperature:g}"
    print_table(f"{first.started.model} on {first.text}, {_protocol(first)}, {greedy}", columns, table)
    _say_where(path)


def _print_forced(rows: Sequence[SpeculativeRow], path: Path | None) -> None:
    table = []
    for row in rows:
        cells = row.to_dict()
        cells["acceptance"] = _percent(cells["acceptance"])
        cells["spread_percent"] = max(cells["spread_percent"], cells["plain_spread_percent"])
        table.append([_shown(cells[name]) for name in _FORCED])
    first = rows[0]
    how = str(first.started.speculative).partition(",k=")[0]
    title = f"{first.started.model} ({first.started.format}), {how}, {_protocol(first)}, guesses right by a coin"
    print_table(title, tuple(_FORCED.values()), table)
    for batch, forced in {row.batch: row.forced for row in rows if row.forced}.items():
        steps = f"{forced.plain_step_ms:.3f} ms, of the draft {forced.draft_step_ms:.3f} ms"
        click.echo(f"batch {batch}: a plain step takes {steps}: c = {forced.cost_ratio:.3f}")
    _say_where(path)


def _protocol(row: SpeculativeRow) -> str:
    return f"prompts of {row.prompt}, {row.new} new tokens, median of {len(row.found.runs)} rounds"


def _percent(share: float | None) -> object:
    return "-" if share is None else round(100 * share, 1)


def _shown(value: Any) -> object:
    return "-" if value is None else value


def _say_where(path: Path | None) -> None:
    if path is not None:
        click.echo(f"appended to {path}")
