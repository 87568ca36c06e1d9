"""`quantkit advise`: the best of the options for a goal, with its reasons. Every number is the plan's or a row's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import InputError
from quantkit.eval.advice.advice import Advice, Change, Reason
from quantkit.eval.advice.options import AS_IT_IS, MOST_LOSS, Asked, Option, Subject, options
from quantkit.eval.plan.efficiency import evidence_for
from quantkit.eval.plan.gpus import GPUS, UNTRIED
from quantkit.eval.plan.guessing import Gain, Guessing, gain
from quantkit.eval.plan.memory import SEQUENCES
from quantkit.eval.plan.weights import UNQUANTIZED
from quantkit.wording import human_bytes, model_name

GUESSES = 4
PAYS_FROM = 0.5  # acceptance: guesses that must be right more often than this to bring a tenth are not recommended


@dataclass(frozen=True)
class Decision:
    """What was chosen from what, as values."""

    subject: Subject
    asked: Asked
    best: Option
    runner_up: Option | None  # the best of another format
    change: Change

    def to_dict(self) -> dict[str, Any]:
        runner_up = None if self.runner_up is None else self.runner_up.to_dict()
        return advice_of(self).to_dict() | {"chosen": self.best.to_dict(), "next": runner_up}


def decide(subject: Subject, asked: Asked) -> Decision:
    """InputError where nothing fits, with the nearest that does."""
    positions, context = subject.model.max_positions, asked.prompt + asked.new
    if positions is not None and context > positions:
        raise InputError(
            f"--prompt and --new are {context:,} tokens together, but {subject.model.name} takes {positions:,}"
        )
    found = sorted(options(subject, asked), key=lambda one: one.cost(asked.goal))
    if not found:
        raise InputError(_fits_not(subject, asked))
    best = min((one for one in found if not found[0].beats(one, asked.goal)), key=lambda one: one.cost(asked.goal)[1:])
    others = [one for one in found if one.format != best.format]
    runner_up = others[0] if others else None
    return Decision(subject, asked, best, runner_up, _change(asked, best, runner_up))


def _change(asked: Asked, best: Option, runner_up: Option | None) -> Change:
    fits = best.replica.stage.fit.requests
    if runner_up is None:
        return Change(None, f"nothing else fits; from {fits + 1:,} requests at once neither does this", fits + 1)
    if asked.goal in ("latency", "throughput"):
        at = _overtaken(asked, best, runner_up)
        if at is not None:
            return Change(runner_up.format, f"{runner_up.format} at {at:,} requests at once", at)
        words = f"{runner_up.format} comes next ({_figure(runner_up)}), and is ahead at no number of requests"
        return Change(runner_up.format, words)
    if fits < SEQUENCES:
        words = (
            f"from {fits + 1:,} requests at once it does not fit; {runner_up.format} comes next ({_figure(runner_up)})"
        )
        return Change(runner_up.format, words, fits + 1)
    return Change(runner_up.format, f"a smaller GPU; {runner_up.format} comes next ({_figure(runner_up)})")


def _overtaken(asked: Asked, best: Option, runner_up: Option) -> int | None:
    """The number of requests nearest to those asked about at which the runner-up wins."""
    room = min(best.replica.room, runner_up.replica.room)
    near = sorted(range(1, room + 1), key=lambda batch: abs(batch - best.load.batch))
    wins = (batch for batch in near if runner_up.at(batch).beats(best.at(batch), asked.goal))
    return next(wins, None)


def advice_of(decision: Decision) -> Advice:
    """The prose of a decision."""
    subject, asked, best = decision.subject, decision.asked, decision.best
    notes = [] if subject.has_weights else [f"{subject.given} has no weights here: put your folder in the commands"]
    if asked.gpu.name in UNTRIED:
        notes.append(UNTRIED[asked.gpu.name])
    return Advice(
        model=subject.model.name,
        goal=asked.goal,
        format=best.format,
        reasons=tuple(_reasons(decision)),
        commands=tuple(_commands(decision)),
        change=decision.change,
        notes=tuple(notes),
    )


def _reasons(decision: Decision) -> Iterator[Reason]:
    best, asked = decision.best, decision.asked
    fit, source = best.replica.stage.fit, evidence_for(best.replica.efficiency, best.replica.ceiling)
    yield Reason("format", _format_words(best), _format_reason(decision), _format_source(decision, source.words))
    cached = f"{fit.requests:,} requests of {asked.prompt + asked.new:,} tokens fit"
    formula = f"plan: {human_bytes(max(0, fit.cache))} / pages of {fit.page_bytes:,} bytes"
    wide = "with the cache in 16 bits" if best.kv_dtype == "auto" else "in 8 bits, and too few in 16"
    yield Reason("cache", "16 bits" if best.kv_dtype == "auto" else best.kv_dtype, f"{cached} {wide}", formula)
    yield _parallelism(best, asked)
    yield _speculation(best, asked)
    figure = f"{best.seconds:.3g} s an answer, {best.tokens_per_second:,.0f} tokens/s of a GPU"
    yield Reason(
        "batch", f"{best.load.batch:,} at once", figure, f"plan: prompts + {asked.new - 1} steps; {source.words}"
    )


def _format_words(best: Option) -> str:
    return f"{best.format} ({best.replica.ceiling.weights.scheme})"


def _format_reason(decision: Decision) -> str:
    best, runner_up = decision.best, decision.runner_up
    if runner_up is None:
        return "it is quantized already" if best.format == AS_IT_IS else "nothing else fits and loses little enough"
    return f"{_figure(best)}, against {_figure(runner_up)} of {runner_up.format}"


def _figure(option: Option) -> str:
    """What its goal looks at."""
    match option.asked.goal:
        case "latency":
            return f"{option.seconds:.3g} s an answer with {option.load.batch:,} at once"
        case "throughput":
            return f"{option.tokens_per_second:,.0f} tokens/s of a GPU with {option.load.batch:,} at once"
        case "memory":
            return f"{human_bytes(option.bytes)} with {option.asked.fewest:,} at once"
        case "quality":
            return f"{option.kl:.3f} nats lost"


def _format_source(decision: Decision, speeds: str) -> str:
    best, goal = decision.best, decision.asked.goal
    compared = [one.loss.source for one in (best, decision.runner_up) if one is not None and one.loss is not None]
    losses = "; ".join(compared) or "unquantized, or as it is: nothing more is lost"
    if goal == "quality":
        return losses
    how = "plan: weights + reserve + pages" if goal == "memory" else f"plan: {speeds}"
    return f"{how}; at most {MOST_LOSS:g} nats lost: {losses}"


def _parallelism(best: Option, asked: Asked) -> Reason:
    fit, gpus = best.replica.stage.fit, best.gpus
    needs = f"{human_bytes(fit.weights)} of weights and {human_bytes(fit.reserve)} for the engine"
    formula = f"plan: {human_bytes(fit.available)} of each {asked.gpu.title} may be used"
    if gpus == 1:
        more = "" if asked.gpus == 1 else f", and {asked.gpus} GPUs would not serve the goal better"
        return Reason("parallelism", "one GPU", f"{needs} fit on it{more}", formula)
    link = best.replica.link.describe()
    return Reason(
        "parallelism", f"tensor parallel {gpus}", f"a rank then holds {needs}", f"{formula}; {link} (assumed)"
    )


def _speculation(best: Option, asked: Asked) -> Reason:
    pays, one = pays_from(best, asked), _gain(best, asked, PAYS_FROM)
    words = f"a step that verifies {GUESSES} guesses for each takes {one.verifying / one.plain:.2f} x as long"
    formula = "plan: 1 + a + ... + a^k tokens of a step, over the time of its rows"
    if pays is None:
        return Reason("speculation", "none", f"{words}, and no acceptance brings a tenth", formula)
    chosen = f"ngram,k={GUESSES}" if speculates(best, asked) else "none"
    why = f"{words}: guesses bring a tenth from an acceptance of {pays:.2f} on"
    if chosen == "none" and pays <= PAYS_FROM:
        why += f", which --goal {asked.goal} does not ask for"
    return Reason("speculation", chosen, why, formula)


def speculates(best: Option, asked: Asked) -> bool:
    """Only where answers wait for steps, and guesses need not be good."""
    pays = pays_from(best, asked)
    return asked.goal == "latency" and pays is not None and pays <= PAYS_FROM


def pays_from(best: Option, asked: Asked) -> float | None:
    """The acceptance, in hundredths, from which guesses for nothing bring a tenth."""
    rates = (hundredth / 100 for hundredth in range(1, 100))
    return next((rate for rate in rates if _gain(best, asked, rate).speed_up >= 1.1), None)


def _gain(best: Option, asked: Asked, acceptance: float) -> Gain:
    guessing, context = Guessing(acceptance, GUESSES), asked.traffic.context
    return gain(best.replica.efficiency, best.replica.ceiling, guessing, best.load.batch, context)


def _commands(decision: Decision) -> Iterator[str]:
    """quantize, serve, eval: only what has to be done."""
    subject, asked, best = decision.subject, decision.asked, decision.best
    served = subject.given
    if best.format not in (UNQUANTIZED, AS_IT_IS):
        served = f"{model_name(subject.given).rpartition('/')[2]}-{best.format}"
        yield shlex.join(["quantkit", "quantize", subject.given, "-r", best.format, "-o", served])
    kept = [] if best.kv_dtype == "auto" else ["--kv-dtype", best.kv_dtype]
    ranks = ["--tensor-parallel", str(best.gpus)] if best.gpus > 1 else []
    ranks += ["--expert-parallel"] if best.replica.ranks.experts else []
    limits = ["--max-context", str(asked.prompt + asked.new), "--max-sequences", str(best.load.batch)]
    guesses = ["--speculative", f"ngram,k={GUESSES}"] if speculates(best, asked) else []
    yield shlex.join(["quantkit", "serve", served, *limits, *kept, *ranks, *guesses])
    base = [] if served == subject.given and not kept else ["--base", subject.given]
    yield shlex.join(["quantkit", "eval", served, *base, *kept])


def _fits_not(subject: Subject, asked: Asked) -> str:
    smallest = min(_any_options(subject, replace(asked, requests=1)), key=lambda one: one.bytes, default=None)
    wanted = f"{asked.fewest:,} request{'s' if asked.fewest > 1 else ''} of {asked.prompt + asked.new:,} tokens"
    where = f"{asked.gpus} x {asked.gpu.title}" if asked.gpus > 1 else f"one {asked.gpu.title}"
    nearest = "; ".join(_nearest(subject, asked)) or "nothing that was tried does"
    least = (
        "" if smallest is None else f" ({smallest.format}, the smallest, takes {human_bytes(smallest.bytes)} with one)"
    )
    return f"{subject.model.name} does not fit on {where} with {wanted}{least}; what does: {nearest}"


def _any_options(subject: Subject, asked: Asked) -> Sequence[Option]:
    """On some number of some GPU."""
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory):
        found = options(subject, replace(asked, gpu=gpu), 8)
        if found:
            return found
    return ()


def _nearest(subject: Subject, asked: Asked) -> Iterator[str]:
    fewer = options(subject, replace(asked, requests=1)) if asked.fewest > 1 else []
    if fewer:
        most = max(fewer, key=lambda one: one.replica.room)
        yield f"--requests {most.replica.room}, as {most.format}"
    more = options(subject, asked, 8)
    if more:
        least = min(more, key=lambda one: one.cost("memory")[1:])
        yield f"--gpus {least.gpus}, as {least.format}"
    larger = sorted((gpu for gpu in GPUS.values() if gpu.memory > asked.gpu.memory), key=lambda gpu: gpu.memory)
    for gpu in larger:
        found = options(subject, replace(asked, gpu=gpu))
        if found:
            yield f"--gpu {gpu.name}, as {min(found, key=lambda one: one.cost('memory')).format}"
            return
