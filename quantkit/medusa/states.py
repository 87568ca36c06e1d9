"""Token sequences with the hidden states that the model has at each token: what heads learn from and are measured on.

The engine itself computes them, so heads see what they will see while serving: its kernels, quantized weights,
activations rounded where the format asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.progress import Progress, silent
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.scoring import hidden_states


@dataclass(frozen=True, eq=False)
class Trace:
    """One sequence."""

    tokens: Tensor  # int64 [tokens]
    states: Tensor  # bfloat16 [tokens, hidden], on the CPU: what the lm head read at each token
    known: int = 0  # tokens at the beginning that were given; the others are the model's own


def trace(
    engine: Engine, sequences: Sequence[Tensor], known: Sequence[int] = (), on_item: Progress = silent
) -> list[Trace]:
    """The hidden states of token sequences [tokens], each computed from its beginning."""
    found = []
    for index, ids in enumerate(sequences):
        states = hidden_states(engine, ids).to("cpu", torch.bfloat16).clone()
        found.append(Trace(ids, states, known[index] if known else 0))
        on_item("hidden states", len(sequences))
    return found


def answers(
    llm: LLM, prompts: Tensor, length: int, temperature: float, seed: int, on_item: Progress = silent
) -> list[Tensor]:
    """Prompts [prompts, tokens] with the model's own answers behind them, of up to `length` tokens each."""
    found: list[Tensor] = []
    for part in prompts.split(llm.engine.options.sequences):
        params = [
            SamplingParams(max_tokens=length, temperature=temperature, seed=seed + len(found) + index)
            for index in range(len(part))
        ]
        for prompt, done in zip(part, llm.generate([row.tolist() for row in part], params), strict=True):
            found.append(torch.cat([prompt, torch.tensor(done.answers[0].token_ids, dtype=torch.long)]))
            on_item("answers", len(prompts))
    return found
