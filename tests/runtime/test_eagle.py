"""EAGLE heads of every published layout guess what a plain implementation guesses, and change no answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import KINDS, Reference, build_target, save_head

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.step_result import Launched, Outcome
from quantkit.runtime.llm import LLM

GUESSES = 4
LENGTHS = (1, 2, 15, 16, 17, 40, 70)  # of prompts: shorter than a draft, around a page, longer than a step


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = build_target()
    folder = tmp_path_factory.mktemp("eagle") / "target"
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def head(target: tuple[Path, Any]) -> Callable[[str], tuple[Path, Reference]]:
    @cache
    def make(kind: str) -> tuple[Path, Reference]:
        folder = target[0].parent / kind
        return folder, save_head(folder, kind, target[1])

    return make


def engine_of(model: Path, head: Path | None, **options: Any) -> LLM:
    if head is not None:
        options["speculative"] = f"eagle={head},k={GUESSES},adaptive=off"
    return LLM(model, device="cpu", dtype="float32", max_context=192, max_sequences=4, step_tokens=48, **options)


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(count)
    return [[dice.randrange(3, 112) for _ in range(length)] for length in LENGTHS[:count]]


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], torch.Tensor | None]]:
    """Known tokens, the guesses behind them, and the logits that they were drawn from, of every step that is seen."""
    runner, seen = llm.engine.runner, []
    collect = runner.collect

    def watched(launched: Launched) -> list[Outcome]:
        row = 0
        for work in launched.sampling:
            if work.draft and launched.verified is not None:
                guesses = launched.verified[row + 1 : row + 1 + len(work.draft)].tolist()
                seen.append((list(work.sequence.tokens), guesses, launched.plan.proposals.get(work.sequence.id)))
            row += 1 + len(work.draft)
        return collect(launched)

    monkeypatch.setattr(runner, "collect", watched)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_guesses_are_those_of_a_plain_implementation(
    target: tuple[Path, Any],
    head: Callable[[str], tuple[Path, Reference]],
    kind: str,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was accepted before; prompts come in pieces, beside answers."""
    folder, reference = head(kind)
    llm = engine_of(target[0], folder, overlap=overlap, share_prefixes=False)
    seen = watch(llm, monkeypatch)
    llm.generate(prompts(7), SamplingParams(max_tokens=14, ignore_eos=True))
    llm.engine.check_integrity()
    assert 0.1 * llm.engine.speculation.guessed < llm.engine.speculation.accepted < 0.8 * llm.engine.speculation.guessed
    for tokens, guesses, _ in seen:
        assert guesses == reference.guesses(tokens, len(guesses)), (len(tokens), guesses)
