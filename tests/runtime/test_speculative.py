"""Guessed tokens change nothing but the number of steps: answers are those of plain decoding, token for token."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.speculative_options import SpeculativeOptions
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.step_result import Launched, Samples
from quantkit.runtime.drafters import draft_model
from quantkit.runtime.drafters.draft_loop import DraftLoop
from quantkit.runtime.drafters.ngram import NgramDrafter
from quantkit.runtime.engine.engine import Engine, Request
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder


def prompts() -> list[str]:
    """Texts that repeat themselves, as code and lists do, and some that do not."""
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    rows = "".join(f"item {number}: value {number}\n" for number in range(12))
    return [
        rows,
        "for i in range(3):\n    print(i)\n" * 3,
        "a b c d " * 10,
        *(text[at : at + 160] for at in (0, 1000)),
    ]


PARAMS = (
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, top_k=20, seed=4, logprobs=2),
    SamplingParams(max_tokens=25, stop=["range", "value 13"], logprobs=0),
    SamplingParams(max_tokens=20, repetition_penalty=1.2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(max_tokens=12, n=2, temperature=0.7, seed=9, ignore_eos=True),
)


def engine_of(model: str = "demo-draft", **options: Any) -> LLM:
    return LLM(model, device="cpu", dtype="float32", max_context=256, max_sequences=6, step_tokens=96, **options)


TEXTS = {"demo-draft": (0, 3), "demo": (0, 3)}  # which prompts; the last one of each does not repeat itself


def serve(llm: LLM, model: str) -> tuple[list[Request], Engine]:
    """Random arrivals, everybody at once, until the last has ended."""
    engine, dice = llm.engine, random.Random(1)
    waiting = [(llm.encode(prompts()[number]), params) for number in TEXTS[model] for params in PARAMS]
    dice.shuffle(waiting)
    requests: list[Request] = []
    while waiting or engine.unfinished:
        for _ in range(min(dice.randint(0, 3), len(waiting))):
            requests.append(engine.add(*waiting.pop()))
        engine.step()
        if dice.random() < 0.1:
            engine.check_integrity()
    engine.drain()
    engine.check_integrity()
    assert engine.scheduler.pool.free == engine.scheduler.pool.usable
    return requests, engine


def told(requests: list[Request]) -> list[tuple[list[int], str | None]]:
    return [(sequence.answer, sequence.finish_reason) for request in requests for sequence in request.sequences]


@pytest.fixture(scope="module")
def plain() -> Callable[[str], list[tuple[list[int], str | None]]]:
    """`plain(model)`: the answers of plain decoding."""
    return cache(lambda model: told(serve(engine_of(model), model)[0]))


FEW_PAGES: dict[str, Any] = {"kv_tokens": 288}
SWAPPED: dict[str, Any] = {"kv_tokens": 288, "swap_gib": 0.05}


@pytest.mark.parametrize(
    ("model", "how", "pressure"),
    [
        ("demo-draft", "ngram,k=6,adaptive=off", {}),
        ("demo-draft", "ngram,k=6,adaptive=off", SWAPPED),
        pytest.param("demo-draft", "draft={noisy},k=3,adaptive=off", {}, marks=pytest.mark.long),
        pytest.param("demo-draft", "draft={noisy},k=3,adaptive=off", FEW_PAGES, marks=pytest.mark.long),
        ("demo-draft", "draft={noisy},k=3,adaptive=off", SWAPPED),
        pytest.param("demo", "draft=demo-draft,k=3,adaptive=off", SWAPPED, marks=pytest.mark.long),
        *(
            pytest.param("demo", "medusa=demo-medusa,adaptive=off", pressure, marks=pytest.mark.long)
            for pressure in ({}, SWAPPED)
        ),
        ("demo-draft", "self=rtn-w3g128,k=6", FEW_PAGES),
    ],
    ids=str,
)
def test_answers_are_those_of_plain_decoding(
    plain: Callable[[str], list[tuple[list[int], str | None]]],
    noisy_draft: Path,
    model: str,
    how: str,
    pressure: dict[str, Any],
) -> None:
    """Greedy and sampled, under random arrivals, chunked prompts, shared prefixes and preemption."""
    llm = engine_of(model, speculative=how.format(noisy=noisy_draft), overlap=True, **pressure)
    requests, engine = serve(llm, model)
    assert told(requests) == plain(model)
    speculation = engine.speculation
    if "adaptive=off" in how:
        assert 20 < speculation.accepted < speculation.guessed
        assert speculation.steps > 20
    if pressure:
        assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("demo-draft", "ngram,k=8"),
        ("demo", "draft=demo-draft"),
        ("demo-draft", "draft=demo-draft"),
        ("demo", "medusa=demo-medusa"),
    ],
)
def test_fewer_steps(model: str, how: str) -> None:
    prompt, params = "a b c d e f " * 12, SamplingParams(max_tokens=48, ignore_eos=True)
    plain, guessed = engine_of(model), engine_of(model, speculative=f"{how},adaptive=off")
    answers = [llm.generate(prompt, params)[0] for llm in (plain, guessed)]
    assert answers[0].text == answers[1].text
    assert guessed.engine.steps < 0.8 * plain.engine.steps
    if how == f"draft={model}":  # the model itself guesses right, always
        assert guessed.engine.speculation.accepted == guessed.engine.speculation.guessed
        assert guessed.engine.steps <= plain.engine.steps / 5 + 2


@pytest.mark.parametrize("sampled", [False, True])
def test_guesses_behind_a_step_are_as_good_as_those_that_wait_for_it(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself guesses. Pages end in the midst of drafts, answers end at different moments."""
    loops = {"run": 0, "run_behind": 0}
    for name in loops:
        plain = getattr(DraftLoop, name)

        def counted(*given: Any, name: str = name, plain: Any = plain) -> Any:
            loops[name] += 1
            return plain(*given)

        monkeypatch.setattr(DraftLoop, name, counted)
    llm = engine_of(speculative="draft=demo-draft,k=5,adaptive=off", overlap=True)
    temperature = {"temperature": 1.0, "top_p": 0.9} if sampled else {}
    params = [SamplingParams(max_tokens=60 + number, ignore_eos=True, **temperature) for number in range(4)]
    llm.generate(prompts()[:4], params)
    seen = llm.engine.speculation
    assert seen.accepted == seen.guessed > 150
    assert loops["run_behind"] > 8
    assert loops["run"] < loops["run_behind"] / 2


def test_a_draft_of_the_model_itself_guesses_what_is_sampled() -> None:
    """Both draw with the same random numbers: where probabilities are the same, every guess is right."""
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True) for seed in range(4)
    ]
    llm = engine_of(speculative="draft=demo-draft,k=4,adaptive=off")
    llm.generate(prompts()[:4], params)
    speculation = llm.engine.speculation
    assert speculation.accepted == speculation.guessed > 80


@pytest.mark.parametrize("largest", [7, 1024])
def test_a_draft_catches_up_after_plain_steps(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what was answered meanwhile, in pieces, and then guesses as well as before."""
    monkeypatch.setattr(draft_model, "MOST_TOKENS", largest)
    llm = engine_of(speculative="draft=demo-draft,k=4,adaptive=off")
    policy, turn = llm.engine.speculation._policy, count()
    always = policy.lengths
    monkeypatch.setattr(policy, "lengths", lambda answering: always(answering) if next(turn) // 10 % 2 else {})
    llm.generate(prompts()[:4], SamplingParams(max_tokens=60, ignore_eos=True))
    speculation = llm.engine.speculation
    assert speculation.accepted == speculation.guessed > 80


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    params = SamplingParams(max_tokens=30, logprobs=3, ignore_eos=True)
    one, other = (llm.generate(prompts()[:3], params) for llm in (engine_of(), engine_of(speculative="ngram")))
    for expected, found in zip(one, other, strict=True):
        assert found.answers[0].token_ids == expected.answers[0].token_ids
        assert found.answers[0].logprobs == pytest.approx(expected.answers[0].logprobs, abs=1e-4)
        assert len(found.answers[0].top_logprobs or []) == 30


def test_lookup_finds_what_followed_before() -> None:
    drafter = NgramDrafter()
    sequence = Sequence(0, [5, 6, 7, 8, 9, 1, 2, 6, 7], SamplingParams(), 0.0, 0, 8)
    assert drafter.propose(sequence, 3) == [8, 9, 1]
    assert drafter.propose(sequence, 9) == [8, 9, 1, 2, 6, 7]
    sequence.tokens += [8, 3]
    assert drafter.propose(sequence, 4) == []
    sequence.tokens += [6, 7]  # stood there twice: the later one counts
    assert drafter.propose(sequence, 2) == [8, 3]
    nothing = Launched(StepPlan([]), [], Samples(torch.zeros(0)), None, {}, None)
    drafter.observe(nothing, [], [sequence.id])
    assert drafter._indexes == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngarm", ("ngarm", "did you mean 'ngram'")),
        ("ngram,k=0", ("k", "1 to 16")),
        ("ngram,k=17", ("1 to 16",)),
        ("ngram,k=many", ("whole number",)),
        ("ngram,n=3", ("'n'", "known: k, adaptive")),
        ("ngram,adaptive=yes", ("on or off",)),
        ("", ("Known: draft, eagle, medusa, ngram, self",)),
        ("medusa", ("medusa=PATH",)),
        ("eagle", ("eagle=PATH",)),
        ("eagle=./nowhere", ("no model at './nowhere'",)),
        ("medusa=nowhere", ("no medusa heads in 'nowhere'", "train-medusa")),
        ("self", ("self=nf4",)),
        ("self=nf5", ("nf5",)),
        ("self=gptq-w4g128", ("needs calibration", "rtn-w4g128", "draft=PATH")),
        ("draft", ("draft=PATH",)),
        ("ngram=x", ("ngram,k=8",)),
    ],
)
def test_wrong_input(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refused:
        LLM("demo", device="cpu", speculative=text)
    for word in words:
        assert word in str(refused.value)


def test_heads_of_another_model() -> None:
    with pytest.raises(InputError, match="belong to another model"):
        LLM("demo-draft", device="cpu", speculative="medusa=demo-medusa")


def test_options() -> None:
    assert SpeculativeOptions.parse("ngram") == SpeculativeOptions("ngram", 8)
    assert replace(SpeculativeOptions.parse("ngram, k=3"), most=8) == SpeculativeOptions("ngram", 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("vocabulary", ("512 tokens", "4096")),
        ("positions", ("64 positions", "--max-context 64")),
        ("missing", ("no model at",)),
    ],
)
def test_a_draft_that_does_not_fit(tmp_path: Path, tiny_model: Path, change: str, words: tuple[str, ...]) -> None:
    folder = tmp_path / "draft"
    if change == "vocabulary":
        folder = tiny_model
    elif change != "missing":
        shutil.copytree(model_folder("demo-draft"), folder)
    if change == "positions":
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 64}))
    with pytest.raises(InputError) as refused:
        engine_of(speculative=f"draft={folder}")
    for word in words:
        assert word in str(refused.value)
