"""What counts in an answer, and what may be said of many: constructed answers with known results."""

from collections.abc import Iterator, Sequence
from math import comb
from typing import Any

import pytest
from referencing.exceptions import Unresolvable

from quantkit.eval.behaviour.answers import Answer
from quantkit.eval.behaviour.checks import calls_tools_rightly, is_json_of, repeats
from quantkit.eval.behaviour.intervals import MARGIN, NO_WORSE, WORSE, paired_difference, share_of, verdict
from quantkit.eval.behaviour.measure import measured, same_answers
from quantkit.eval.behaviour.measures import MEASURES
from quantkit.eval.behaviour.prompts import BehaviourPrompt
from quantkit.eval.behaviour.questions import Question
from quantkit.eval.behaviour.thoughts import Said, said
from quantkit.runtime.server.tools.syntaxes import SYNTAXES

BLOCK = [5, 6, 7, 8, 9, 10, 11, 12]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "add_person", "parameters": PERSON | {"additionalProperties": False}}}
ANYTHING = {"type": "function", "function": {"name": "ping"}}
RIGHT = '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([1, *BLOCK * 3], True),
        ([1, *BLOCK * 2], False),
        ([*BLOCK * 3, 1], False),  # it found the way out
        ([1, *BLOCK[3:], *BLOCK * 3, *BLOCK[:3]], True),  # a limit ends a loop anywhere
        ([1] + [2] * 24, True),
        ([1] + [2] * 23, False),
        ([1, *[2, 3, 4] * 9], True),  # three of these are 9 tokens
        ([1, *[2, 3, 4] * 8], False),
        (list(range(30)) * 3, True),
        ([*range(30), *range(30), *range(29), 99], False),
        (BLOCK[:7] * 3, False),
    ],
)
def test_an_answer_that_ends_in_a_loop(tokens: list[int], expected: bool) -> None:
    assert repeats(tokens) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, True),
        (f"\n {RIGHT}\n", True),
        ('{"age": 36, "name": "Ada"}', True),  # in any order
        (f"```json\n{RIGHT}\n```", True),
        (f"```\n{RIGHT}```", True),
        (f"Here it is: {RIGHT}", False),
        (f"```json\n{RIGHT}\n```\nIs that right?", False),
        (RIGHT[:-1], False),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada", "age": NaN}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_of_a_schema(text: str, expected: bool) -> None:
    assert is_json_of(text, PERSON) is expected


def test_a_schema_never_reaches_for_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *asked, **_: fetched.append(asked))
    with pytest.raises(Unresolvable):
        is_json_of("1", {"$ref": "https://example.invalid/schema"})
    assert fetched == []


@pytest.mark.parametrize("style", SYNTAXES)
def test_tool_calls(style: str) -> None:
    syntax, tools = SYNTAXES[style], [TOOL, ANYTHING]

    def counts(*calls: tuple[str, str]) -> bool:
        return calls_tools_rightly(syntax.between.join(syntax.write(*call) for call in calls), tools, style)

    assert counts(("add_person", RIGHT))
    assert counts(("ping", "{}"))
    assert counts(("ping", '{"any": 1}'), ("add_person", RIGHT))
    assert not counts(("add_person", '{"name": "Ada"}'))
    assert not counts(("add_person", RIGHT[:-1] + ', "height": 1}'))
    assert not counts(("remove_person", RIGHT))
    assert not counts(("ping", "{}"), ("add_person", "{}")), "one wrong call spoils the answer"
    assert not calls_tools_rightly("I would call add_person.", tools, style)
    assert not calls_tools_rightly(syntax.write("add_person", RIGHT)[:-3], tools, style)


def test_wilson() -> None:
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20 and 1 of 29."""
    for successes, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611),
                                        (1, 29, 0.0061, 0.1718)):  # fmt: skip
        found = share_of([1.0] * successes + [0.0] * (count - successes))
        assert (found.value, found.low, found.high) == pytest.approx((successes / count, low, high), abs=5e-5)
    assert share_of([1.0] * 20).high == 1
    halves, mixed = share_of([0.5] * 10), share_of([0.0, 1.0] * 5)
    assert halves == mixed, "two answers to a prompt are no two prompts"


def outcomes(prompts: int, lost: float, gained: float) -> Iterator[tuple[float, list[float]]]:
    """Every result that may come where prompts are lost and gained with these probabilities, and how probable it is."""
    for losses in range(prompts + 1):
        for gains in range(prompts + 1 - losses):
            same = prompts - losses - gains
            ways = comb(prompts, losses) * comb(prompts - losses, gains)
            yield (
                ways * lost**losses * gained**gains * (1 - lost - gained) ** same,
                [-1.0] * losses + [1.0] * gains + [0.0] * same,
            )


@pytest.mark.parametrize(
    ("prompts", "lost", "gained"), [(20, 0.1, 0.1), (20, 0.3, 0.02), (40, 0.02, 0.02), (40, 0.5, 0.1)]
)
def test_the_interval_of_a_difference_holds_the_truth(prompts: int, lost: float, gained: float) -> None:
    held = 0.0
    for chance, differences in outcomes(prompts, lost, gained):
        found = paired_difference(differences)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
        held += chance * (found.low <= gained - lost <= found.high)
    assert 0.93 < held < 0.999


@pytest.mark.parametrize(("prompts", "most"), [(4, 0.063), (7, 0.063), (13, 0.063), (20, 0.04), (21, 0.04), (38, 0.04)])
def test_verdicts_of_a_model_that_is_as_good_are_seldom_worse(prompts: int, most: float) -> None:
    """docs/reference/eval.md says so: 2.5 % is one side of the interval, and prompts are lost whole."""
    for moved in (0.02, 0.1, 0.3, 0.4, 0.45, 0.5):
        wrong = sum(chance for chance, found in outcomes(prompts, moved, moved) if verdict(found) == WORSE)
        assert wrong <= most


def test_verdicts() -> None:
    def said(lost: int, gained: int, same: int) -> str:
        return verdict([-1.0] * lost + [1.0] * gained + [0.0] * same)

    assert said(0, 0, 20) == NO_WORSE
    assert said(0, 4, 16) == NO_WORSE
    assert said(20, 0, 0) == WORSE
    assert said(5, 0, 15) == WORSE
    assert said(4, 0, 16) == "cannot tell with 20 prompts"
    assert said(3, 3, 14) == "cannot tell with 20 prompts"
    assert said(1, 0, 0) == "cannot tell with 1 prompt"
    assert said(1, 1, 198) == NO_WORSE, f"fewer than {MARGIN:.0%} were lost, whatever the prompts"
    assert said(8, 0, 192) == WORSE, "a small loss is a loss where it is certain"


def question(
    schema: Any = None, tools: Sequence[Any] = (), forced: bool = False, thinking: bool | None = None
) -> Question:
    return Question(BehaviourPrompt(1, [], schema, tools), [1], forced, thinking)


def test_every_measure_of_constructed_answers() -> None:
    """The model loops, breaks JSON, calls nothing and thinks for ever; its original does none of that."""
    call = SYNTAXES["hermes"].write("ping", "{}")
    kinds = [question(thinking=True), question(PERSON), question(PERSON, forced=True), question(tools=[ANYTHING])]
    questions = kinds * 8
    good = [Answer([1, 2], text, ended=True) for text in ("</think>Hello!", RIGHT, RIGHT, call)] * 8
    bad = [Answer([3] * 30, text, ended=False) for text in ("x x x", "{", '{"name": "', "ping")] * 8
    lines = {}
    for measure in MEASURES:
        own, other = [[one] for one in bad], [[one] for one in good]
        worse = measured(measure, questions, own, other, "hermes", "")
        assert worse.verdict == WORSE
        assert measured(measure, questions, other, own, "hermes", "").verdict == NO_WORSE
        assert worse.share is not None
        assert worse.base_share is not None
        assert worse.difference is not None
        assert worse.difference.value == worse.share.value - worse.base_share.value
        lines[measure.name] = (worse.share.value, worse.base_share.value, worse.prompts)
    free, one_kind = 3 * 8, 8
    assert lines == {
        "ends": (0, 1, free),
        "repeats": (1, 0, free),
        "valid_json": (0, 1, one_kind),
        "forced_json_ends": (0, 1, one_kind),
        "tool_calls": (0, 1, one_kind),
        "finished_thoughts": (0, 1, one_kind),
    }


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("Blue.", False, Said("Blue.", True)),
        ("<think>Sky.</think>Blue.", False, Said("Blue.", True)),
        ("Sky.</think>\n\nBlue.", True, Said("\n\nBlue.", True)),
        ("Sky.</think>Blue.", False, Said("Blue.", True)),  # begun where nobody looked
        ("<think>a</think>One, <think>b</think>two.", False, Said("One, two.", True)),
        ("<think>a</think>One, <think>b", False, Said("One, ", False)),
        ("<think>Sky. Blue. Sky.", False, Said("", False)),
        ("Sky. Blue. Sky.", True, Said("", False)),
        ("Sky.</think>\n", True, Said("\n", False)),  # and then nothing
        ("", False, Said("", False)),
    ],
)
def test_thoughts_in_an_answer(text: str, thinking: bool, expected: Said) -> None:
    assert said(text, thinking=thinking) == expected


def test_what_stands_in_a_thought_is_no_answer() -> None:
    call = SYNTAXES["hermes"].write("ping", "{}")
    for name, about, right in (("valid_json", {"schema": PERSON}, RIGHT), ("tool_calls", {"tools": [ANYTHING]}, call)):
        (measure,) = (one for one in MEASURES if one.name == name)
        for text, expected in ((f"{right}</think>{right}", 1.0), (f"{right}</think>No.", 0.0), (right, 0.0)):
            answers = [[Answer([1], text, ended=True)]]
            assert measure.shares([question(**about, thinking=True)], answers, "hermes") == [expected]
        assert measure.shares([question(**about)], [[Answer([1], f"x</think>{right}", True)]], "hermes") == [
            float(name == "tool_calls")
        ], "a model without thoughts has none in its answers"


def test_without_a_base_there_is_no_verdict_and_without_prompts_no_share() -> None:
    ends, _, valid_json, *_ = MEASURES
    alone = measured(ends, [question()], [[Answer([1], "a", True), Answer([1], "a", False)]], None, "hermes", "")
    assert alone.share is not None
    assert (alone.share.value, alone.verdict, alone.difference) == (0.5, None, None)
    nothing = measured(valid_json, [question()], [[Answer([1], "a", True)]], None, "hermes", "no prompt has a schema")
    assert (nothing.share, nothing.prompts, nothing.not_measured) == (None, 0, "no prompt has a schema")


def test_where_answers_begin_to_differ() -> None:
    def compare(*pairs: tuple[list[int], list[int]]) -> tuple[float, int | None]:
        own, other = ([[Answer(pair[side], "", True)] for pair in pairs] for side in (0, 1))
        found = same_answers([question()] * len(pairs), own, other)
        return found.share.value, found.first_difference

    assert compare(([1, 2], [1, 2])) == (1, None)
    assert compare(([1, 2], [1, 2]), ([1, 2, 3], [1, 9, 3]), ([1], [1, 2, 3, 4]), ([], [7])) == (0.25, 2)
    limited = same_answers([question()], [[Answer([1], "", True)]], [[Answer([1], "", False)]])
    assert (limited.share.value, limited.first_difference) == (0, 2), "one ended, the other was cut off"
