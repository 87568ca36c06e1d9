"""The measures: which questions each is about, and what an answer must do to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.eval.behaviour.answers import Answer
from quantkit.eval.behaviour.checks import calls_tools_rightly, is_json_of, repeats
from quantkit.eval.behaviour.prompts import Kind
from quantkit.eval.behaviour.questions import Question
from quantkit.eval.behaviour.thoughts import Said, said

Counts = Callable[[Question, Answer, str], bool]  # the text says how the model writes tool calls


@dataclass(frozen=True)
class Measure:
    """A share of answers."""

    name: str
    label: str  # answers that ...
    counts: Counts
    kind: Kind | None = None  # of the prompts that it is about; None: all
    forced: bool = False  # whether it is about answers under a guide
    thoughts: bool = False  # whether it is about models that write thoughts
    higher_is_better: bool = True

    def is_about(self, question: Question) -> bool:
        thinks = not self.thoughts or question.thinking is not None
        return thinks and question.forced == self.forced and self.kind in (None, question.prompt.kind)

    def shares(self, questions: Sequence[Question], answers: Sequence[Sequence[Answer]], style: str) -> list[float]:
        """For each question that it is about, the share of the answers that count."""
        return [
            sum(self.counts(question, answer, style) for answer in given) / len(given)
            for question, given in zip(questions, answers, strict=True)
            if self.is_about(question)
        ]


def _ends(question: Question, answer: Answer, style: str) -> bool:
    return answer.ended


def _repeats(question: Question, answer: Answer, style: str) -> bool:
    return repeats(answer.tokens)


def _is_json(question: Question, answer: Answer, style: str) -> bool:
    assert question.prompt.schema is not None
    return is_json_of(_said(question, answer).text, question.prompt.schema)


def _calls_tools(question: Question, answer: Answer, style: str) -> bool:
    return calls_tools_rightly(_said(question, answer).text, question.prompt.tools, style)


def _finishes_thoughts(question: Question, answer: Answer, style: str) -> bool:
    return _said(question, answer).finished


def _said(question: Question, answer: Answer) -> Said:
    """JSON in a thought is no answer, and a call in one is no call."""
    if question.thinking is None:
        return Said(answer.text, finished=True)
    return said(answer.text, thinking=question.thinking)


MEASURES = (
    Measure("ends", "end by themselves", _ends),
    Measure("repeats", "repeat themselves", _repeats, higher_is_better=False),
    Measure("valid_json", "are JSON of the schema", _is_json, kind="json"),
    Measure("forced_json_ends", "end, schema forced", _ends, kind="json", forced=True),
    Measure("tool_calls", "call a tool rightly", _calls_tools, kind="tools"),
    Measure("finished_thoughts", "finish their thoughts", _finishes_thoughts, thoughts=True),
)
