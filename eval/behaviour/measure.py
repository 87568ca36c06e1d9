"""What quantization did to a model's behaviour: does it stop, loop, keep to JSON, call tools, finish its thoughts.

Perplexity sees none of that: it looks at one token at a time, after a text that somebody else wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.eval.behaviour.answers import Answer, Asking, Bar, answers_of, no_bar
from quantkit.eval.behaviour.checks import SHORTEST_LOOP
from quantkit.eval.behaviour.intervals import paired_difference, share_of, verdict
from quantkit.eval.behaviour.measures import MEASURES, Measure
from quantkit.eval.behaviour.prompts import BUNDLED_PROMPTS, BehaviourPrompt, read_prompts
from quantkit.eval.behaviour.questions import Question, questions_of
from quantkit.eval.behaviour.results import BehaviourResult, MeasureResult, SameAnswers
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.tools.parsers import style_of
from quantkit.sources import model_folder
from quantkit.wording import model_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLING_TEMPERATURE = 0.7  # of several answers to a prompt
Answers = Sequence[Sequence[Answer]]  # to each question


def measure_behaviour(
    model: str | Path,
    base: str | Path | None = None,
    *,
    prompts: str | Path = BUNDLED_PROMPTS,
    samples: int = 1,
    max_tokens: int = 256,
    need_template: bool = False,
    head_bits: int | None = None,
    arithmetic: str | None = None,
    bar: Bar = no_bar,
    **engine: Any,
) -> BehaviourResult:
    """Behaviour on a file of prompts, compared with that of `base` on the same prompts and seeds.

    One answer a prompt is greedy, several are drawn. `head_bits` and `arithmetic` are the model's only, as in the
    other measures; `engine` are options of `LLM` for both. `bar` shows how far it is.
    """
    if max_tokens < SHORTEST_LOOP:
        raise InputError(f"answers of {max_tokens} tokens cannot show a loop; allow {SHORTEST_LOOP} or more")
    read = read_prompts(prompts)
    asking = Asking(samples, 0.0 if samples == 1 else SAMPLING_TEMPERATURE, max_tokens)
    tokenizer = load_tokenizer(model_folder(model))
    questions = questions_of(read, tokenizer, need_template=need_template)
    assert tokenizer is not None  # or there would be no questions
    if base is not None:
        _check_comparable(model, base, read, questions)
    answers, computed = answers_of(model, questions, asking, bar, head_bits=head_bits, arithmetic=arithmetic, **engine)
    base_answers = None if base is None else answers_of(base, questions, asking, bar, **engine)[0]
    style = style_of(tokenizer)
    return BehaviourResult(
        model=model_name(model),
        base=None if base is None else model_name(base),
        measures=tuple(
            measured(one, questions, answers, base_answers, style, _why_not(one, read, tokenizer)) for one in MEASURES
        ),
        same_answers=None if base_answers is None else same_answers(questions, answers, base_answers),
        prompts=sum(not question.forced for question in questions),
        chat_template=bool(tokenizer.chat_template),
        asking=asking,
        arithmetic=computed + EngineOptions(head_bits=head_bits, arithmetic=arithmetic).as_told,
        failures=tuple(one.failure for given in (*answers, *(base_answers or ())) for one in given if one.failure),
        answers=_listed(questions, answers, base_answers, style),
    )


def measured(
    measure: Measure, questions: Sequence[Question], answers: Answers, base: Answers | None, style: str, why_not: str
) -> MeasureResult:
    """One line of the result; `why_not` is for a measure that no question is about."""
    about = measure.name, measure.label, measure.higher_is_better
    shares = measure.shares(questions, answers, style)
    if not shares:
        return MeasureResult(*about, 0, None, not_measured=why_not)
    if base is None:
        return MeasureResult(*about, len(shares), share_of(shares))
    base_shares = measure.shares(questions, base, style)
    differences = [own - other for own, other in zip(shares, base_shares, strict=True)]
    sign = 1 if measure.higher_is_better else -1
    return MeasureResult(
        *about,
        len(shares),
        share_of(shares),
        share_of(base_shares),
        paired_difference(differences),
        verdict([sign * one for one in differences]),
    )


def same_answers(questions: Sequence[Question], answers: Answers, base: Answers) -> SameAnswers:
    """Of the answers into which nothing was forced."""
    shares, places = [], []
    for question, own, other in zip(questions, answers, base, strict=True):
        if not question.forced:
            found = [_first_difference(one, two) for one, two in zip(own, other, strict=True)]
            shares.append(fmean(place is None for place in found))
            places += [place for place in found if place is not None]
    return SameAnswers(share_of(shares), median_low(places) if places else None)


def _first_difference(one: Answer, two: Answer) -> int | None:
    """Counted from 1; None where there is none."""
    for place, (own, other) in enumerate(zip(one.tokens, two.tokens, strict=False), start=1):
        if own != other:
            return place
    if len(one.tokens) == len(two.tokens) and one.ended == two.ended:
        return None
    return min(len(one.tokens), len(two.tokens)) + 1


def _check_comparable(
    model: str | Path, base: str | Path, prompts: Sequence[BehaviourPrompt], questions: Sequence[Question]
) -> None:
    """Refuses a base that reads the prompts otherwise, before minutes of loading."""
    others = questions_of(prompts, load_tokenizer(model_folder(base)))
    if [one.tokens for one in questions] != [one.tokens for one in others]:
        raise InputError(
            f"{model_name(model)} and {model_name(base)} read the prompts as different tokens, by their tokenizers or "
            "their chat templates; choose the model it was made from"
        )


def _why_not(measure: Measure, prompts: Sequence[BehaviourPrompt], tokenizer: PreTrainedTokenizerBase) -> str:
    if measure.thoughts or (measure.kind == "tools" and any(prompt.tools for prompt in prompts)):
        lacking = f"the chat template has no {'thoughts' if measure.thoughts else 'tools'}"
        return lacking if tokenizer.chat_template else "the model has no chat template"
    return "no prompt has tools" if measure.kind == "tools" else "no prompt has a schema"


def _listed(questions: Sequence[Question], answers: Answers, base: Answers | None, style: str) -> list[dict[str, Any]]:
    """Every question with its answers and what they count for: where to look when a verdict is "worse"."""

    def described(question: Question, given: Sequence[Answer]) -> list[dict[str, Any]]:
        about = [measure for measure in MEASURES if measure.is_about(question)]
        return [
            {"text": one.text, "tokens": len(one.tokens)}
            | {measure.name: measure.counts(question, one, style) for measure in about}
            for one in given
        ]

    listed = []
    for number, question in enumerate(questions):
        entry: dict[str, Any] = {"line": question.prompt.line, "forced": question.forced}
        entry["model"] = described(question, answers[number])
        if base is not None:
            entry["base"] = described(question, base[number])
        listed.append(entry)
    return listed
