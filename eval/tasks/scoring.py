"""Log-probabilities of given tokens from the engine, many requests at a time.

A continuation is forced: the engine answers a prompt, a guide leaves it one token to choose from, and the
log-probability that it reports is the model's own, before the guide. No token is computed for nothing, and prompts use
the prefix cache: the choices of an item share their context. A long continuation would take too many steps that way;
all of it but its last token is then part of the prompt, whose log-probabilities the engine computes without the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.progress import Progress, silent
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Guide
from quantkit.runtime.engine.engine import Engine, Request
from quantkit.runtime.output.output_processor import OutputProcessor, TextOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_FORCED = 16  # tokens of a continuation
_IN_FLIGHT = 4  # requests handed over at a time, for each that can run: enough to fill every step


@dataclass(frozen=True)
class Scored:
    """A continuation as the model sees it."""

    logprob: float  # of all its tokens together
    greedy: bool  # whether each of them is the model's first choice


@dataclass(frozen=True)
class Job:
    """One request to the engine. `item` is its place in the caller's list."""

    item: int
    prompt: list[int]
    params: SamplingParams
    guides: tuple[Guide, ...] = ()


class ForcedTokens:
    """A guide that leaves one token to choose from."""

    def __init__(self, tokens: list[int], vocab: int) -> None:
        self._tokens = tokens
        self._vocab = vocab
        self._next = 0

    @property
    def finished(self) -> bool:
        return self._next == len(self._tokens)

    def mask(self) -> Tensor:
        return self._only(self._next)

    def mask_behind(self, guesses: tuple[int, ...]) -> Tensor:
        end = self._next + len(guesses)
        if tuple(self._tokens[self._next : end]) != guesses or end == len(self._tokens):
            raise QuantkitError("the guessed tokens are not the forced ones")
        return self._only(end)

    def _only(self, place: int) -> Tensor:
        allowed = torch.zeros(self._vocab, dtype=torch.bool)
        allowed[self._tokens[place]] = True
        return allowed

    def advance(self, token: int) -> None:
        assert token == self._tokens[self._next]
        self._next += 1


def score(engine: Engine, pairs: list[tuple[list[int], list[int]]], on_item: Progress = silent) -> list[Scored]:
    """Of (context, continuation), neither of them empty, in the order given."""
    by_context = sorted(range(len(pairs)), key=lambda item: (-len(pairs[item][0]), pairs[item][0]))
    scored: dict[int, Scored] = {}
    jobs = (_scoring_job(engine, item, *pairs[item]) for item in by_context)
    for job, request, outputs in run_jobs(engine, jobs):
        scored[job.item] = _scored(request, outputs, pairs[job.item][1])
        on_item("", len(pairs))
    return [scored[item] for item in range(len(pairs))]


def run_jobs(
    engine: Engine, jobs: Iterable[Job], tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[tuple[Job, Request, list[TextOutput]]]:
    """Every job with its request and all that came for it, as they finish. Only a few are in memory at a time.

    Stop strings need the tokenizer.
    """
    waiting = iter(jobs)
    running: dict[int, tuple[Job, Request, list[TextOutput]]] = {}
    processors: dict[int, OutputProcessor] = {}
    most = _IN_FLIGHT * engine.options.sequences
    try:
        while True:
            while len(running) < most and (job := next(waiting, None)) is not None:
                request = engine.add(job.prompt, job.params, guides=job.guides)
                running[request.id] = (job, request, [])
                abort = partial(engine.abort, request.id)
                processors[request.id] = OutputProcessor(tokenizer, job.prompt, job.params, engine.config.eos, abort)
            if not running:
                return
            for output in engine.step():
                found = processors[output.request].process(output)
                running[output.request][2].extend([] if found is None else [found])
            for done in [one for one in running.values() if one[1].finished]:
                del running[done[1].id], processors[done[1].id]
                yield done
    finally:
        for _, request, _ in running.values():  # an error, an interrupt: leave nothing behind
            engine.abort(request.id)
        engine.drain()


def _scoring_job(engine: Engine, item: int, context: list[int], continuation: list[int]) -> Job:
    forced = len(continuation) if len(continuation) <= MOST_FORCED else 1
    params = SamplingParams(
        max_tokens=forced,
        ignore_eos=True,  # a continuation may hold end tokens
        logprobs=1,
        prompt_logprobs=None if forced == len(continuation) else 1,
    )
    tokens = context + continuation
    return Job(item, tokens[:-forced], params, (ForcedTokens(tokens[-forced:], engine.config.vocab),))


def _scored(request: Request, outputs: list[TextOutput], continuation: list[int]) -> Scored:
    logprobs = [value for part in request.prompt_logprobs for value in part.logprobs]
    first = [row[0][0] for part in request.prompt_logprobs for row in part.top]
    for output in outputs:
        assert output.logprob is not None
        assert output.top
        logprobs.append(output.logprob)
        first.append(output.top[0][0])
    count = len(continuation)
    return Scored(sum(logprobs[-count:]), first[-count:] == continuation)
