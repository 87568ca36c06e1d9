"""Logits that are no numbers, for one sequence of an engine."""

import math
from typing import Any

import pytest
from torch import Tensor

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.sampling.sampler import Sampler

# Every way to a token: the largest, a draw with log-probabilities, penalties.
KINDS = {
    "greedy": SamplingParams(max_tokens=12, ignore_eos=True),
    "sampled": SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=1.0, top_p=0.9, top_k=40, seed=1, logprobs=3
    ),
    "penalized": SamplingParams(
        max_tokens=12, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.5, logprobs=0
    ),
}  # fmt: skip


def spoil(monkeypatch: pytest.MonkeyPatch, victim: Sequence, known: int) -> None:
    """One of its logits is NaN as soon as so many of its tokens are known."""
    sample = Sampler.__call__

    def spoiled(self: Sampler, logits: Tensor, owners: Any, *rest: Any) -> Any:
        logits = logits.clone()
        for row, owner in enumerate(owners):
            if owner is victim and len(victim.answer) >= known:
                logits[row, 17] = math.nan
        return sample(self, logits, owners, *rest)

    monkeypatch.setattr(Sampler, "__call__", spoiled)
