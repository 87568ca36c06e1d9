"""Tasks on quantkit's engine against lm-eval's own `hf` model, item by item, in float32 on a CPU."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from quantkit.errors import InputError
from quantkit.eval.tasks.engine_model import EngineModel
from quantkit.eval.tasks.results import TaskResults
from quantkit.eval.tasks.run import run_tasks
from quantkit.eval.tasks.scoring import MOST_FORCED
from quantkit.reference import load_reference, load_tokenizer
from quantkit.runtime.llm import LLM

CONTEXT = 96  # of the engine in tests that cut items; its model then sees one token less before what it predicts
SENTENCE = "The function returns a list of all the names that were found in the file."


@pytest.fixture(autouse=True)
def _no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval asks a dozen programs, pip among them, about the machine in every run: a second, and nobody reads it."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def engine_model() -> Iterator[EngineModel]:
    model = EngineModel(LLM("demo-draft", device="cpu", dtype="float32", max_context=CONTEXT))
    yield model
    model.llm.engine.check_integrity()
    assert model.llm.engine.unfinished == 0


@pytest.fixture(scope="module")
def hf_model() -> HFLM:
    reference = load_reference("demo-draft", "float32")
    tokenizer = load_tokenizer("demo-draft")
    return HFLM(pretrained=reference, tokenizer=tokenizer, batch_size=1, max_length=CONTEXT - 1, logits_cache=False)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=("a_task", number, 1))
        for number, one in enumerate(arguments)
    ]


def compare(ours: TaskResults, theirs: TaskResults) -> dict[str, int]:
    """Every answer of every item; how many there were of each kind."""
    counts = {"items": 0, "scored": 0, "rolled": 0, "written": 0}
    assert ours.samples is not None
    assert theirs.samples is not None
    assert ours.samples.keys() == theirs.samples.keys()
    for task, items in ours.samples.items():
        for mine, other in zip(items, theirs.samples[task], strict=True):
            assert mine["arguments"] == other["arguments"]
            counts["items"] += 1
            for (found,), (expected,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(found, str):
                    assert found == expected
                    counts["written"] += 1
                elif isinstance(found, tuple):
                    assert found == (pytest.approx(expected[0], abs=1e-2), expected[1])
                    counts["scored"] += 1
                else:
                    assert found == pytest.approx(expected, abs=1e-2)
                    counts["rolled"] += 1
    return counts


def both(model: str | Path, tasks: str, **how: Any) -> tuple[TaskResults, TaskResults]:
    ours, theirs = (
        run_tasks(model, tasks, device="cpu", dtype="float32", backend=backend, with_samples=True, **how)
        for backend in ("runtime", "reference")
    )
    return ours, theirs


def same_scores(ours: TaskResults, theirs: TaskResults) -> None:
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        assert (mine.task, mine.metric, mine.n) == (other.task, other.metric, other.n)
        assert mine.value == pytest.approx(other.value, rel=1e-3)
        assert mine.stderr == (None if other.stderr is None else pytest.approx(other.stderr, rel=1e-3))


@pytest.mark.long
def test_170_last_words_equal_the_hf_model() -> None:
    ours, theirs = both("demo", "local_last_word", limit=170)
    assert compare(ours, theirs) == {"items": 170, "scored": 170, "rolled": 0, "written": 0}
    same_scores(ours, theirs)
    accuracy = next(score.value for score in ours.scores if score.metric == "acc")
    assert 0.3 < accuracy < 0.7, "too easy or too hard to tell formats apart"


@pytest.mark.parametrize("limit", [3, pytest.param(12, marks=pytest.mark.long)])
def test_choices_and_completions_equal_the_hf_model(limit: int) -> None:
    ours, theirs = both("demo-draft", "local_continuation,local_completion", limit=limit)
    assert compare(ours, theirs) == {"items": 2 * limit, "scored": 4 * limit, "rolled": 0, "written": limit}
    same_scores(ours, theirs)


@pytest.mark.parametrize("limit", [2, pytest.param(6, marks=pytest.mark.long)])
def test_documents_equal_the_hf_model(limit: int) -> None:
    ours, theirs = both("demo-draft", "local_rolling", limit=limit)
    assert compare(ours, theirs) == {"items": limit, "scored": 0, "rolled": limit, "written": 0}
    same_scores(ours, theirs)


@pytest.mark.parametrize("limit", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_quantized_checkpoint_equals_the_hf_model(limit: int, quantized_draft: Callable[..., Path]) -> None:
    ours, theirs = both(quantized_draft("nf4"), "local", limit=limit)
    assert compare(ours, theirs) == {"items": 4 * limit, "scored": 5 * limit, "rolled": limit, "written": limit}
    assert ours.setting.model == "nf4"


def test_chat_template_and_examples_equal_the_hf_model() -> None:
    ours, theirs = both("demo-draft", "local_completion,local_continuation", limit=2, chat_template=True, fewshot=1)
    assert compare(ours, theirs) == {"items": 4, "scored": 8, "rolled": 0, "written": 2}
    assert ours.samples is not None
    prompt = ours.samples["local_completion"][0]["arguments"][0][0]
    assert prompt.count("<|user|>") == 2
    assert prompt.endswith("<|assistant|>\n")


def test_odd_texts_equal_the_hf_model(engine_model: EngineModel, hf_model: HFLM) -> None:
    pairs = requests(
        "loglikelihood",
        ("", SENTENCE),
        ("", "<|endoftext|>The"),
        ("The function ", "returns"),
        ("The function", " "),
        (SENTENCE, f" {SENTENCE} {SENTENCE}"),
        ("Ein größeres Δ, 数字", " 日本語 🙂 e\u0301"),
        ("<|endoftext|>The function", " returns<|endoftext|>"),
    )
    assert 2 * len(hf_model.tok_encode(SENTENCE)) > MOST_FORCED, "one that is not forced must be among them"
    found, expected = engine_model.loglikelihood(pairs), hf_model.loglikelihood(pairs, disable_tqdm=True)
    for mine, other in zip(found, expected, strict=True):
        assert mine == (pytest.approx(other[0], abs=1e-3), other[1])


def test_items_beyond_the_context_are_cut_as_the_hf_model_cuts_them(engine_model: EngineModel, hf_model: HFLM) -> None:
    text = " ".join([SENTENCE] * 20)
    before = engine_model.truncated
    pairs = requests("loglikelihood", (text, " It ends here."), (text, text[:250]), ("It", " fits."))
    found, expected = engine_model.loglikelihood(pairs), hf_model.loglikelihood(pairs, disable_tqdm=True)
    assert [mine[0] for mine in found] == pytest.approx([other[0] for other in expected], abs=1e-3)
    assert engine_model.truncated == before + 2
    documents = requests("loglikelihood_rolling", (text,), (SENTENCE,), ("",))
    expected_sums = hf_model.loglikelihood_rolling(documents, disable_tqdm=True)
    assert engine_model.loglikelihood_rolling(documents) == pytest.approx(expected_sums, abs=1e-3)
    answers = requests("generate_until", (text, {"until": ["\n"], "max_gen_toks": 20}))
    assert engine_model.generate_until(answers) == hf_model.generate_until(answers, disable_tqdm=True)


def test_stops_equal_the_hf_model(engine_model: EngineModel, hf_model: HFLM) -> None:
    """Stop texts within tokens and across them, one text instead of a list, and none."""
    prompts = requests(
        "generate_until",
        (SENTENCE, {"until": [" the", ".\n"], "max_gen_toks": 24}),
        (SENTENCE, {"until": "e", "max_gen_toks": 24}),
        ("The list", {"until": [], "max_new_tokens": 8}),
        ("The list", {"until": ["<|end|>", "\n\n"], "max_gen_toks": 30, "do_sample": False, "temperature": 0.7}),
    )
    assert engine_model.generate_until(prompts) == hf_model.generate_until(prompts, disable_tqdm=True)


def test_what_cannot_be_scored_is_refused_in_one_line(engine_model: EngineModel) -> None:
    cases = [
        ("loglikelihood", ("", ""), "item 0 of task 'a_task' has neither context nor continuation"),
        ("loglikelihood", ("The", ""), "a continuation has 0 tokens"),
        ("loglikelihood", ("a", "b"), "a continuation has 0 tokens"),  # the tokenizer makes one token of both
        ("loglikelihood", ("The", " long" * 500), "can score 1 to 95"),
        ("generate_until", ("The", {"max_gen_toks": 500}), "wants longer answers than the model's 96 tokens allow"),
        ("generate_until", ("The", {"num_beams": 4}), "'num_beams', which the engine lacks"),
    ]
    for kind, arguments, words in cases:
        with pytest.raises(InputError, match=words) as refused:
            getattr(engine_model, kind)(requests(kind, arguments))
        assert "\n" not in str(refused.value)
    assert engine_model.llm.engine.unfinished == 0


def test_choices_share_their_context(engine_model: EngineModel) -> None:
    scheduler = engine_model.llm.engine.scheduler
    context = "Choices: " + SENTENCE
    length = len(engine_model.tok_encode(context))
    before = scheduler.reused_tokens
    engine_model.loglikelihood(requests("loglikelihood", *((context, f" {choice}") for choice in "ABCD")))
    assert scheduler.reused_tokens - before == 3 * (length // 16 * 16)


def test_the_option_of_eval(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    args = ("--tasks", "local_last_word", "--limit", 2, "--device", "cpu", "--json")
    code, out, _ = run_cli("eval", "demo-draft", *args)
    assert code == 0
    found = json.loads(out)
    assert {score["task"] for score in found["scores"]} == {"local_last_word"}
    assert all(score["n"] == 2 for score in found["scores"])
