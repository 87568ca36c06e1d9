"""Logits or hidden states of every position of a text, as the engine computes prompts: its kernels, pages and budget.

Generation needs the logits of the last position only. Measurements need all of them, and Medusa heads learn from the
hidden states, so this runs the decoder itself, beside the scheduler and on pages of the same pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.devices import on_device
from quantkit.errors import InputError
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.batch import Batch
from quantkit.runtime.sampling.prompt_logprobs import ROWS


@torch.inference_mode()
def score_tokens(engine: Engine, ids: Tensor, step_tokens: int | None = None) -> Tensor:  # [tokens, vocab]
    """Logits behind every token of `ids` [tokens], in the engine's dtype; requests that the engine has are unharmed.

    The tokens go through the paged cache in steps of `step_tokens`, at most the engine's budget, which is the default.
    Steps of one token take the kernels of decoding, long ones those of prompts. No prefix is shared, no graph replayed.
    """
    _check(engine, ids, step_tokens)
    logits = engine.runner.decoder.logits
    step = min(step_tokens or engine.options.budget, engine.options.budget)
    return _run(engine, ids, step, lambda hidden: torch.cat([logits(rows) for rows in hidden.split(ROWS)]))


def hidden_states(engine: Engine, ids: Tensor) -> Tensor:  # [tokens, hidden]
    """What the lm head reads at every token of `ids` [tokens], through the paged cache in steps of the budget."""
    return _run(engine, ids, engine.options.budget, lambda hidden: hidden)


def _run(engine: Engine, ids: Tensor, step: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """What is read from the hidden states of every step, put together."""
    pool = engine.scheduler.pool
    pages = pool.allocate(-(-len(ids) // pool.page_size))
    if pages is None:
        raise InputError(
            f"{len(ids)} tokens need {-(-len(ids) // pool.page_size)} pages of the cache, {pool.free} are free; "
            "use a shorter text or give the engine more kv_tokens"
        )
    try:
        with on_device(engine.runner.device):
            table = torch.tensor(pages, dtype=torch.int32, device=engine.runner.device)
            return torch.cat([read(_step(engine, ids, table, start, step)) for start in range(0, len(ids), step)])
    finally:
        pool.release(pages)


def _step(engine: Engine, ids: Tensor, table: Tensor, start: int, count: int) -> Tensor:
    """The hidden states of one step's tokens; those before `start` are in the cache."""
    runner = engine.runner
    size, device = runner.cache.page_size, runner.device
    part = ids[start : start + count].to(device)
    end = start + len(part)
    positions = torch.arange(start, end, device=device)
    batch = Batch(
        ids=part,
        positions=positions,
        kv_slots=table[positions // size].long() * size + positions % size,
        page_table=table[None, : -(-end // size)],
        context_lengths=torch.tensor([end], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, len(part)], dtype=torch.int32, device=device),
        max_queries=len(part),
        host_lengths=([0, len(part)], [end]),
    )
    return runner.decoder.hidden_states(batch, runner.cache)


def _check(engine: Engine, ids: Tensor, step_tokens: int | None) -> None:
    if step_tokens is not None and step_tokens < 1:
        raise InputError(f"step_tokens is {step_tokens}, but must be 1 or more")
    if ids.dim() != 1 or not 1 <= len(ids) <= engine.memory.max_context:
        raise InputError(
            f"token ids of shape {list(ids.shape)} cannot be scored; give one row of 1 to {engine.memory.max_context}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= engine.config.vocab:
        raise InputError(f"token ids from {low} to {high}, but the vocabulary has {engine.config.vocab} tokens")
