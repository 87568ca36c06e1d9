"""The answers of one model to all questions, from one batch of the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import InputError
from quantkit.eval.behaviour.questions import Question
from quantkit.eval.tasks.scoring import Job, run_jobs
from quantkit.progress import Progress, silent
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from quantkit.runtime.output.output_processor import TextOutput
from quantkit.runtime.sampling.structured_output import GuideCompiler
from quantkit.wording import model_name

Bar = Callable[[str], AbstractContextManager[Progress]]  # from a label to a bar that is shown while it is open
MOST_AT_ONCE = 64  # answers on a CPU: 1.4 times as fast as the engine's usual 16 (demo-draft), 1.6 times (demo)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]  # without an end token
    text: str
    ended: bool  # by an end token, or where a guide left nothing to add
    failure: str | None = None  # why the engine gave up


@dataclass(frozen=True)
class Asking:
    """How questions are asked: the same for both models, so that their answers compare."""

    samples: int = 1  # answers to each question
    temperature: float = 0.0  # 0: greedy
    max_tokens: int = 256  # of an answer
    seed: int = 0

    def params(self, number: int) -> SamplingParams:
        """Of the question with this number; no two answers share their luck."""
        return SamplingParams(
            n=self.samples,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed + number * self.samples,
        )


def no_bar(label: str) -> AbstractContextManager[Progress]:
    """Nobody watches."""
    return nullcontext(silent)


def answers_of(
    model: str | Path, questions: Sequence[Question], asking: Asking, bar: Bar = no_bar, **engine: Any
) -> tuple[list[list[Answer]], str]:
    """For each question its answers; and on what they were computed. `engine` are options of `LLM`.

    The model is gone afterwards: the next one finds the memory free.
    """
    if EngineOptions(**engine).torch_device.type == "cpu":
        engine = {"max_sequences": min(MOST_AT_ONCE, len(questions) * asking.samples)} | engine
    try:
        return _answered(model, questions, asking, bar, engine)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _answered(
    model: str | Path, questions: Sequence[Question], asking: Asking, bar: Bar, engine: dict[str, Any]
) -> tuple[list[list[Answer]], str]:
    found: list[list[Answer]] = [[] for _ in questions]
    with bar(f"loading {model_name(model)}") as advance:
        llm = LLM(model, on_block=advance, **engine)
    try:
        _check_room(llm, questions, asking)
        with bar(f"answers of {model_name(model)}") as advance:
            for job, _, outputs in run_jobs(llm.engine, _jobs(llm, questions, asking), llm.tokenizer):
                ends = job.params.end_tokens(llm.engine.config.eos)
                found[job.item] = [_answer(outputs, index, ends) for index in range(asking.samples)]
                advance("", len(questions))
    finally:
        llm.close()
    dtype = str(llm.engine.runner.decoder.weights.dtype).removeprefix("torch.")
    return found, f"{dtype} on {llm.engine.runner.device}"


def _check_room(llm: LLM, questions: Sequence[Question], asking: Asking) -> None:
    """A context that ends earlier than the limit would look like an answer that does not end."""
    most = llm.engine.memory.max_context
    for question in questions:
        if len(question.tokens) + asking.max_tokens > most:
            raise InputError(
                f"the prompt of line {question.prompt.line} has {len(question.tokens)} tokens and its answer may have "
                f"{asking.max_tokens}, but contexts end at {most}; shorten one of them"
            )


def _jobs(llm: LLM, questions: Sequence[Question], asking: Asking) -> Iterator[Job]:
    engine, compiler = llm.engine, None
    for number, question in enumerate(questions):
        guides: list[Any] = []
        if question.guide is not None:
            compiler = compiler or GuideCompiler(llm.tokenizer, engine.config.vocab, engine.config.eos)
            guides = [compiler.compile(question.guide) for _ in range(asking.samples)]
        yield Job(number, question.tokens, asking.params(number), tuple(guides))


def _answer(outputs: Sequence[TextOutput], index: int, ends: Sequence[int]) -> Answer:
    own = [output for output in outputs if output.index == index]
    tokens = [output.token for output in own if output.token is not None]
    last = own[-1]
    if last.finished == "stop" and last.token in ends:
        tokens.pop()
    failure = str(last.stop_reason) if last.finished == "error" else None
    return Answer(tokens, "".join(output.text for output in own), last.finished == "stop", failure)
