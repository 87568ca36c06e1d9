"""`quantkit eval --behaviour` on the small bundled model: whole, spoiled, and with other chat templates."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.eval.behaviour.answers import Answer, Asking, _answer, answers_of
from quantkit.eval.behaviour.measure import measure_behaviour
from quantkit.eval.behaviour.measures import MEASURES
from quantkit.eval.behaviour.prompts import BUNDLED_PROMPTS, read_prompts
from quantkit.eval.behaviour.questions import Question, questions_of
from quantkit.runtime.core.sequence import FinishReason
from quantkit.runtime.output.output_processor import TextOutput
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.sources import model_folder

Cli = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]
TOKENS = 24


@pytest.fixture(scope="module")
def few_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two to chat, six with schemas whose answers are short, one with tools."""
    lines = BUNDLED_PROMPTS.read_text(encoding="utf-8").splitlines()
    file = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    file.write_text("\n".join(lines[place] for place in (0, 1, 42, 44, 45, 47, 51, 52, 60)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def one_of_each(few_prompts: Path) -> Path:
    """To chat, with a schema, with tools."""
    lines = few_prompts.read_text(encoding="utf-8").splitlines()
    file = few_prompts.with_name("three.jsonl")
    file.write_text("\n".join((lines[0], lines[2], lines[-1])), encoding="utf-8")
    return file


def with_template(folder: Path, template: str | None) -> Path:
    """The small model with another chat template, or none."""
    shutil.copytree(model_folder("demo-draft"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


def test_the_same_model_is_no_worse(few_prompts: Path) -> None:
    found = measure_behaviour("demo-draft", "demo-draft", prompts=few_prompts, max_tokens=TOKENS, device="cpu")
    assert [one.verdict for one in found.measures] == ["no worse"] * 4 + [None] * 2
    missing = [one.not_measured for one in found.measures[4:]]
    assert missing == ["the chat template has no tools", "the chat template has no thoughts"]
    assert {one.difference.value for one in found.measures if one.difference} == {0}
    assert found.same_answers is not None
    assert (found.same_answers.share.value, found.same_answers.first_difference) == (1, None)
    assert (found.worse, found.failures, found.prompts) == ([], (), 8)


def test_a_spoiled_model_is_worse_and_stopped_by_the_gate(
    run_cli: Cli, few_prompts: Path, quantized_draft: Callable[..., Path]
) -> None:
    how = ("--behaviour-prompts", few_prompts, "--behaviour-tokens", TOKENS, "--behaviour-gate", "--device", "cpu")
    code, out, err = run_cli("eval", quantized_draft("rtn-w2g64"), "--base", "demo-draft", "--behaviour", *how)
    assert (code, err) == (1, "quantkit: worse than demo-draft, the share of answers that end, schema forced\n")
    rows = {cells[1]: cells[2:-1] for line in out.splitlines() if len(cells := [*map(str.strip, line.split("│"))]) > 3}
    assert list(rows) == [one.label for one in MEASURES]
    assert rows["end, schema forced"][0] == "6"
    assert rows["end, schema forced"][2] == "100.0% [61.0%, 100.0%]", "of the original; Wilson of 6 prompts"
    assert rows["end, schema forced"][-1] == "worse"
    assert rows["call a tool rightly"] == ["0", "", "", "", "not measured: the chat template has no tools"]
    assert rows["finish their thoughts"] == ["0", "", "", "", "not measured: the chat template has no thoughts"]
    assert "the same as demo-draft's, token by token: " in out
    assert "8 prompts through the chat template, greedy, at most 24 tokens, seed 0" in out
    assert "float32 on cpu" in out


def test_answers_of_a_batch_are_those_of_single_prompts(few_prompts: Path) -> None:
    """Ends, limits and guides: the whole batch against one question at a time, two answers each."""
    questions = questions_of(read_prompts(few_prompts), load_tokenizer(model_folder("demo-draft")))
    chosen = [questions[0], *[one for one in questions if one.forced][:2]]
    asking = Asking(samples=2, temperature=0.7, max_tokens=TOKENS, seed=5)

    def answers(asked: Sequence[Question], asking: Asking) -> list[list[Answer]]:
        return answers_of("demo-draft", asked, asking, device="cpu")[0]

    together = answers(chosen, asking)
    alone = answers(chosen[1:2], Asking(2, 0.7, TOKENS, seed=5 + 2))  # the seeds of the second question
    assert together[1] == alone[0]
    for given, question in zip(together, chosen, strict=True):
        assert len(given) == 2
        for one in given:
            assert (len(one.tokens) == TOKENS) is not one.ended
            assert one.text
            if question.forced and one.ended:
                json.loads(one.text)
    assert together[0][0] != together[0][1], "two answers have two seeds"


def test_what_ends_an_answer() -> None:
    def answer(token: int | None, finished: FinishReason, why: str | None = None) -> Answer:
        last = TextOutput(0, 1, token, finished=finished, stop_reason=why)
        return _answer([TextOutput(0, 1, 7, "seven"), TextOutput(0, 0, 9, "of another answer"), last], 1, (3,))

    assert answer(3, "stop") == Answer([7], "seven", ended=True)
    assert answer(8, "stop") == Answer([7, 8], "seven", ended=True), "a guide was finished"
    assert answer(8, "length") == Answer([7, 8], "seven", ended=False)
    assert answer(None, "error", "not finite") == Answer([7], "seven", ended=False, failure="not finite")


def test_a_template_with_tools_and_thoughts_and_a_model_without_one(one_of_each: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"prompts": one_of_each, "max_tokens": TOKENS, "device": "cpu"}
    template = "{% if tools %}{{ tools[0].function.name }}: {% endif %}{{ messages[-1].content.split('</think>')[-1] }}"
    found = measure_behaviour(with_template(tmp_path / "tools", f"{template}<think>"), **how)
    calls = found.measures[4]
    assert calls.share is not None
    assert (calls.prompts, calls.share.value, found.prompts, calls.verdict) == (1, 0, 3, None)
    thoughts = found.measures[5]
    assert thoughts.share is not None
    assert (thoughts.prompts, thoughts.share.value) == (3, 0), "a model that never heard of them ends none"
    plain = with_template(tmp_path / "plain", None)
    found = measure_behaviour(plain, **how)
    assert "2 prompts as plain text, for there is no chat template" in found.protocol
    assert {one.not_measured for one in found.measures[4:]} == {"the model has no chat template"}
    with pytest.raises(InputError, match="read the prompts as different tokens"):
        measure_behaviour(plain, "demo-draft", **how)
    with pytest.raises(
        InputError, match=r"line 1 has \d+ tokens and its answer may have 2048, but contexts end at 2048"
    ):
        measure_behaviour("demo-draft", **how | {"max_tokens": 2048})


def test_json_of_the_command(run_cli: Cli, one_of_each: Path) -> None:
    how = ("--behaviour-prompts", one_of_each, "--behaviour-tokens", TOKENS, "--behaviour-samples", 2, "--head-bits", 8)
    code, out, err = run_cli("eval", "demo-draft", "--behaviour", *how, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["asking"] == {"samples": 2, "temperature": 0.7, "max_tokens": TOKENS, "seed": 0}
    assert found["protocol"].endswith("float32 on cpu, head 8 bit")
    assert (found["base"], found["same_answers"], found["measures"][0]["verdict"]) == (None, None, None)
    assert {len(entry["model"]) for entry in found["answers"]} == {2}
    ended = [answer["ends"] for entry in found["answers"] if not entry["forced"] for answer in entry["model"]]
    assert found["measures"][0]["share"]["value"] == pytest.approx(sum(ended) / len(ended))
    assert [(entry["line"], entry["forced"]) for entry in found["answers"]] == [(1, False), (2, False), (2, True)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--behaviour", "--behaviour-gate"), ("--behaviour-gate", "name it with --base")),
        (("--behaviour-gate",), ("--behaviour-gate is about behaviour; add --behaviour",)),
        (("--behaviour-samples", 2), ("--behaviour-samples is about behaviour",)),
        (("--behaviour", "--tasks", "local"), ("--behaviour and --tasks are two measurements",)),
        (("--behaviour", "--limit", 4), ("--limit is about tasks",)),
        (("--behaviour", "--layers"), ("--layers is about perplexity, which --behaviour does not measure",)),
        (("--behaviour", "--backend", "reference"), ("--behaviour runs on the engine",)),
        (("--behaviour", "--behaviour-prompts", "gone.jsonl"), ("cannot read the prompts in gone.jsonl",)),
        (("--behaviour", "--behaviour-tokens", 23), ("answers of 23 tokens cannot show a loop; allow 24 or more",)),
        (("--behaviour", "--base", "./nowhere"), ("no model at './nowhere'",)),
    ],
)
def test_wrong_options_are_one_line(
    args: tuple[object, ...], words: tuple[str, ...], assert_refused: Refused, tmp_path: Path
) -> None:
    assert_refused(tmp_path, "eval", "demo-draft", *args, words=words)
