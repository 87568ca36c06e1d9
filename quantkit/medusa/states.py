"""Token sequences with the hidden states that the model has at each token: what heads learn from and are measured on.

The engine itself computes them, so heads see what they will see while serving: its kernels, quantized weights,
activations rounded where the format asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.progress import Progress, silent
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.model.batch import Batch


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


def hidden_states(engine: Engine, ids: Tensor) -> Tensor:
    """What the lm head reads at every token of `ids` [tokens], through the paged cache in steps of the budget."""
    pool, budget = engine.scheduler.pool, engine.options.budget
    pages = pool.allocate(-(-len(ids) // pool.page_size))
    if pages is None:
        raise InputError(f"the cache has no room for {len(ids)} tokens, {pool.free} pages are free; use shorter texts")
    try:
        table = torch.tensor(pages, dtype=torch.int32, device=engine.runner.device)
        return torch.cat([_step(engine, ids[:end], table, start) for start, end in _steps(len(ids), budget)])
    finally:
        pool.release(pages)


def _steps(length: int, budget: int) -> list[tuple[int, int]]:
    return [(start, min(start + budget, length)) for start in range(0, length, budget)]


def _step(engine: Engine, ids: Tensor, table: Tensor, start: int) -> Tensor:
    """Of the tokens from `start` on; those before are in the cache."""
    runner = engine.runner
    size, device, end = runner.cache.page_size, runner.device, len(ids)
    positions = torch.arange(start, end, device=device)
    batch = Batch(
        ids=ids[start:].to(device),
        positions=positions,
        kv_slots=table[positions // size].long() * size + positions % size,
        page_table=table[None, : -(-end // size)],
        context_lengths=torch.tensor([end], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        max_queries=end - start,
    )
    return runner.decoder.hidden_states(batch, runner.cache)


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
