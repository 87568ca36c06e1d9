"""The two protocols of `quantkit bench speculative`.

    forced   a target and a draft; guesses are right by a coin of a known chance. Says what speculation costs and brings
             on this machine at every acceptance, without a trained pair of models.
    text     real prompts and real guesses, by any `--speculative`.

The plain engine stays in memory, and one that speculates stands beside it, so that both are measured in turn.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import token_windows
from quantkit.errors import InputError
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.start import CHECKPOINT, check_draft, parse_shape, start
from quantkit.eval.speculative.decode import Decoded, Rounds, decode_all, interleaved
from quantkit.eval.speculative.results import Forced, SpeculativeRow
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.speculative_options import SpeculativeOptions
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.sources import model_folder

HELDOUT = "heldout"  # instead of a file: the text that ships


@dataclass(frozen=True)
class Load:
    """What is decoded, for each batch."""

    batches: tuple[int, ...]
    prompt: int  # tokens
    new: int
    rounds: int

    def options(self, **given: object) -> EngineOptions:
        """Engines with a cache just large enough, so that two of them fit on a device."""
        most, longest = max(self.batches), self.prompt + self.new
        page = EngineOptions.page_size
        tokens = most * (-(-longest // page) + 1) * page
        return EngineOptions(max_sequences=most, max_context=longest, kv_tokens=tokens, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ForcedPlan:
    target: str  # a folder, a hub name, `demo`, or shape:NAME:FORMAT
    draft: str
    guesses: tuple[int, ...]  # k
    chances: tuple[float, ...]
    load: Load
    adaptive: bool = False  # as many guesses as pay; else always k, whether they pay or not

    def how(self, guesses: int) -> str:
        return f"draft={self.draft},k={guesses},adaptive={'on' if self.adaptive else 'off'}"

    @property
    def rows(self) -> int:
        return len(self.load.batches) * len(self.guesses) * len(self.chances)


@dataclass(frozen=True)
class TextPlan:
    target: str
    ways: tuple[str, ...]  # of --speculative
    text: str  # a file, or HELDOUT
    temperature: float
    prompts: int
    load: Load

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.load.new, ignore_eos=True, temperature=self.temperature)

    @property
    def rows(self) -> int:
        return len(self.load.batches) * (len(self.ways) + 1)


def forced_rows(plan: ForcedPlan, options: EngineOptions) -> Iterator[SpeculativeRow]:
    """A row for every k, batch and chance."""
    for guesses in plan.guesses:
        check_draft(plan.target, replace(options, speculative=plan.how(guesses)))
    target, _ = _start(plan.target, options)
    steps = _steps_alone(plan, target, options)
    for guesses in plan.guesses:
        _free(options)
        yield from _forced_with(plan, guesses, target, steps, options)


def _steps_alone(plan: ForcedPlan, target: Engine, options: EngineOptions) -> dict[int, tuple[float, float]]:
    """Milliseconds of a plain step of the target and of the draft, for each batch."""
    draft, _ = _start(plan.draft, options)
    found = {}
    for batch in plan.load.batches:
        runs = [partial(_random_run, engine, plan.load, batch) for engine in (target, draft)]
        own, other = interleaved(runs, plan.load.rounds)
        found[batch] = own.step_ms, other.step_ms
    return found


def _forced_with(
    plan: ForcedPlan, guesses: int, target: Engine, steps: dict[int, tuple[float, float]], options: EngineOptions
) -> Iterator[SpeculativeRow]:
    engine, started = _start(plan.target, replace(options, speculative=plan.how(guesses)))
    load = plan.load
    _capture(engine, load)
    for batch in load.batches:
        runs = [partial(_random_run, target, load, batch)]
        runs += [partial(_random_run, engine, load, batch, chance, count()) for chance in plan.chances]
        plain, *others = interleaved(runs, load.rounds)
        for chance, found in zip(plan.chances, others, strict=True):
            forced = Forced(guesses, chance, *steps[batch])
            yield SpeculativeRow(started, batch, load.prompt, load.new, plain, found, forced=forced)


def _random_run(
    engine: Engine, load: Load, batch: int, chance: float | None = None, seeds: Iterator[int] | None = None
) -> Decoded:
    """Random prompts; with a chance, other coins in every round."""
    if chance is not None and seeds is not None:
        engine.speculation.force_acceptance(chance, seed=next(seeds))
    generator = random.Random(0)
    prompts = [[generator.randrange(engine.config.vocab) for _ in range(load.prompt)] for _ in range(batch)]
    return decode_all(engine, prompts, batch, SamplingParams(max_tokens=load.new, ignore_eos=True))


def text_rows(plan: TextPlan, options: EngineOptions) -> Iterator[SpeculativeRow]:
    """For every batch a plain row, then one for each way to guess."""
    if parse_shape(plan.target) is not None:
        raise InputError("a shape has random weights and no tokens, so no text fits it; give a folder, or --draft")
    for how in plan.ways:
        SpeculativeOptions.parse(how)  # a wrong one is refused before anything is loaded
    target, started = _start(plan.target, options)
    prompts = cut_prompts(plan)
    for place, how in enumerate(plan.ways):
        _free(options)
        for row in _guessed_by(how, plan, prompts, target, options):
            if place == 0:
                yield replace(row, started=started, found=row.plain)
            yield row


def _guessed_by(
    how: str, plan: TextPlan, prompts: Sequence[list[int]], target: Engine, options: EngineOptions
) -> Iterator[SpeculativeRow]:
    engine, started = _start(plan.target, replace(options, speculative=how))
    _capture(engine, plan.load)
    for batch in plan.load.batches:
        own = prompts[: max(len(prompts) // batch, 1) * batch]
        runs = [partial(decode_all, each, own, batch, plan.params) for each in (target, engine)]
        plain, found = interleaved(runs, plan.load.rounds)
        yield _text_row(started, plan, batch, plain, found)


def _text_row(started: Started, plan: TextPlan, batch: int, plain: Rounds, found: Rounds) -> SpeculativeRow:
    load, name = plan.load, Path(plan.text).name
    return SpeculativeRow(started, batch, load.prompt, load.new, plain, found, name, plan.temperature)


def cut_prompts(plan: TextPlan) -> list[list[int]]:
    """Pieces of a text, spread over it; at least as many as the largest batch."""
    tokenizer = load_tokenizer(model_folder(plan.target))
    if tokenizer is None:
        raise InputError("this model folder has no tokenizer, so no text can be cut into prompts; give another model")
    file = HELDOUT_TEXT if plan.text == HELDOUT else Path(plan.text)
    windows = token_windows(tokenizer, file, plan.load.prompt)
    wanted = max(plan.prompts, *plan.load.batches)
    if len(windows) < wanted:
        raise InputError(
            f"{file.name} has {len(windows)} prompts of {plan.load.prompt} tokens, but {wanted} are wanted; use a "
            "longer text, or lower --prompt-len, --prompts or --batch"
        )
    return [windows[number * len(windows) // wanted].tolist() for number in range(wanted)]


def _start(model: str, options: EngineOptions) -> tuple[Engine, Started]:
    name, fmt = parse_shape(model) or (model, CHECKPOINT)
    return start(name, fmt, options, first=False)


def _capture(engine: Engine, load: Load) -> None:
    """Graphs for every number of guesses, which a server captures in its warm-up: none is made while the clock runs."""
    graphs = engine.runner.graphs
    if graphs is not None:
        for batch in load.batches:
            for guesses in engine.speculation.lengths:
                engine.speculation.prepare(graphs, batch, guesses)


def _free(options: EngineOptions) -> None:
    """Gives back what an engine held that nobody holds any longer."""
    gc.collect()
    if options.torch_device.type == "cuda":
        torch.cuda.empty_cache()
