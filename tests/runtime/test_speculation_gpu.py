"""Speculation on a GPU: guesses stay there, and steps are graphs. In 16 bit a step with guesses rounds otherwise than a
plain one, so answers may part where two tokens are almost equally probable."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.drafters.draft_model import ModelDrafter
from quantkit.runtime.llm import LLM

pytestmark = pytest.mark.gpu

TEXT = HELDOUT_TEXT.read_text(encoding="utf-8")
PROMPTS = [TEXT[at : at + 200] for at in range(0, 6000, 500)]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)


def llm_of(**options: Any) -> LLM:
    return LLM("demo", device="cuda", kv_tokens=20_000, max_context=512, max_sequences=16, **options)


def answers(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    found = [generation.answers[0].token_ids for generation in llm.generate(PROMPTS, params)]
    llm.engine.check_integrity()
    return found


def same_beginning(one: list[int], other: list[int]) -> int:
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right), len(one))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "how", ["ngram,k=6", "draft=demo-draft,k=4", "draft=demo-draft,k=7", "self=rtn-w4g128,k=3", "medusa=demo-medusa"]
)
def test_answers_are_those_of_plain_decoding(how: str, graphs: bool) -> None:
    plain = answers(llm_of())
    llm = llm_of(speculative=f"{how},adaptive=off", graphs=graphs)
    found = answers(llm)
    alike = [same_beginning(one, other) for one, other in zip(plain, found, strict=True)]
    assert sum(alike) > 0.7 * 48 * len(PROMPTS)
    seen = llm.engine.speculation
    assert seen.accepted > 0.1 * seen.steps > 5  # of a tree's guesses only one path can hold


def sampled(seed: int | None) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.0, top_p=0.9, seed=seed and seed + number)
        for number in range(len(PROMPTS))
    ]


@pytest.mark.parametrize(
    ("params", "share"), [(GREEDY, 0.93), (sampled(7), 0.8), (sampled(None), 0.93)], ids=["greedy", "seeds", "drawn"]
)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_model_itself_guesses_right(params: Any, share: float, graphs: bool) -> None:
    """With a seed, a rounding error may move a draw across the border between two tokens."""
    llm = llm_of(speculative="draft=demo,k=4,adaptive=off", graphs=graphs)
    answers(llm, params)
    speculation = llm.engine.speculation
    assert speculation.accepted > share * speculation.guessed > 200


@pytest.mark.parametrize("graphs", [True, False])
def test_a_draft_catches_up_after_plain_steps(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what was answered meanwhile, and then guesses as well as before."""
    llm = llm_of(speculative="draft=demo,k=4,adaptive=off", graphs=graphs)
    policy, turn = llm.engine.speculation._policy, count()
    always = policy.lengths
    monkeypatch.setattr(policy, "lengths", lambda answering: always(answering) if next(turn) // 10 % 2 else {})
    answers(llm, SamplingParams(max_tokens=120, ignore_eos=True))
    speculation = llm.engine.speculation
    assert speculation.accepted > 0.93 * speculation.guessed > 200


def test_nothing_is_captured_after_the_warm_up() -> None:
    llm = llm_of(speculative="draft=demo-draft,k=3", warm_up=True)
    drafter = llm.engine.speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    kinds = llm.engine.runner.graphs, llm.engine.runner.part.prompt_graphs, drafter._part.prompt_graphs, drafter.loop
    before = [set(graphs._graphs) for graphs in kinds if graphs is not None]
    assert len(before) == 4
    answers(llm)
    answers(llm, sampled(None))
    assert [set(graphs._graphs) for graphs in kinds if graphs is not None] == before


def test_many_kinds_of_requests_at_once() -> None:
    """Penalties, log-probabilities, seeds and long prompts beside each other, with graphs and without."""
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=30, repetition_penalty=1.2, frequency_penalty=0.2, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.8, seed=3, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, min_tokens=10),
    ]
    llm = llm_of(speculative="draft=demo-draft,k=4", step_tokens=128)
    params = [kinds[number % 4] for number in range(len(PROMPTS))]
    for generation, wanted in zip(llm.generate(PROMPTS, params), params, strict=True):
        assert 10 <= len(generation.answers[0].token_ids) <= wanted.max_tokens
    llm.engine.check_integrity()


def test_graphs_of_the_draft_share_the_place_of_their_logits() -> None:
    """Each has logits of every guess, which must stay until they are verified."""
    llm = llm_of(speculative="draft=demo-draft,k=4")
    drafter = llm.engine.speculation._drafter
    assert isinstance(drafter, ModelDrafter)
    drafter.loop.prepare(16, 4, drawn=True)  # the largest
    before = torch.cuda.memory_allocated()
    for sequences in drafter.loop.sizes:
        for guesses in (1, 2, 3, 4):
            drafter.loop.prepare(sequences, guesses, drawn=True)
    assert torch.cuda.memory_allocated() - before < 4 * llm.engine.config.vocab * 2
