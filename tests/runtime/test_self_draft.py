"""The model itself in fewer bits as its draft: made while it loads, or another checkpoint that `quantize` wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from quantkit.bundled import HELDOUT_TEXT
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM

PROMPTS = [HELDOUT_TEXT.read_text(encoding="utf-8")[at : at + 150] for at in range(0, 2000, 500)]
# No LLM.int8 here: which columns it leaves in 16 bit depends on all tokens of a step, with guesses or without.
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(quantized_draft: Callable[..., Path]) -> dict[str, Path]:
    """The smaller bundled model in several formats."""
    return {recipe: quantized_draft(recipe) for recipe in ("nf4", "rtn-w4g128", "rtn-w8")}


def answers(model: Path | str, speculative: str | None) -> tuple[list[list[int]], float]:
    llm = LLM(model, device="cpu", dtype="float32", max_context=256, speculative=speculative)
    found = [generation.answers[0].token_ids for generation in llm.generate(PROMPTS, GREEDY)]
    speculation = llm.engine.speculation
    return found, speculation.accepted / max(speculation.guessed, 1)


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path]) -> Callable[[str], list[list[int]]]:
    """`alone(target)`: what it answers without guesses."""
    return cache(lambda target: answers(checkpoints.get(target, target), None)[0])


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("demo-draft", "self=rtn-w8"),
        ("demo-draft", "self=nf4"),
        ("demo-draft", "draft=rtn-w8"),
        ("nf4", "self=rtn-w8"),
        ("rtn-w4g128", "self=nf4"),
        pytest.param("demo", "self=rtn-w3g128", marks=pytest.mark.long),  # too few bits for the smaller one
        pytest.param("nf4", "self=nf4", marks=pytest.mark.long),
        pytest.param("nf4", "draft=rtn-w8", marks=pytest.mark.long),
        pytest.param("rtn-w4g128", "self=rtn-w8", marks=pytest.mark.long),
        pytest.param("rtn-w4g128", "draft=rtn-w8", marks=pytest.mark.long),
    ],
)
def test_every_pair_answers_as_the_target_alone(
    target: str, how: str, checkpoints: dict[str, Path], alone: Callable[[str], list[list[int]]]
) -> None:
    model = checkpoints.get(target, target)
    kind, _, name = how.partition("=")
    draft = str(checkpoints[name]) if kind == "draft" else name
    found, acceptance = answers(model, f"{kind}={draft},k=3,adaptive=off")
    assert found == alone(target)
    assert acceptance > 0.25


def test_a_draft_made_while_loading_is_the_checkpoint_of_that_recipe(checkpoints: dict[str, Path]) -> None:
    """Both round the same weights in the same way, so they guess the same."""
    made, stored = (answers("demo-draft", f"{how},k=3,adaptive=off")
                    for how in ("self=nf4", f"draft={checkpoints['nf4']}"))  # fmt: skip
    assert made == stored
