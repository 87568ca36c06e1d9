"""Steps as lists of whole numbers: what rank 0 tells the other ranks, and what they read out of it."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from quantkit.runtime.device.step_inputs import PageMoves, Step, StepInputs
from quantkit.runtime.model.batch import Batch
from quantkit.runtime.parallel.channel import Lists

_INPUTS = tuple(field.name for field in fields(StepInputs))


def step_to_lists(step: Step) -> Lists:
    inputs = (getattr(step.inputs, name) for name in _INPUTS)
    return [[int(step.all_tokens)], step.table_index, step.table_pages, *inputs]


def step_from_lists(lists: Lists) -> Step:
    (all_tokens,), index, pages, *inputs = lists
    return Step(StepInputs(**dict(zip(_INPUTS, inputs, strict=True))), index, pages, bool(all_tokens))


def moves_to_lists(moves: PageMoves) -> Lists:
    """Each sequence's pages are a list that begins with its id."""
    counts = [len(moves.out), len(moves.back)]
    each = [[sequence, *pages] for sequence, pages in (*moves.out, *moves.back)]
    return [counts, moves.dropped, [page for pair in moves.copies for page in pair], *each]


def moves_from_lists(lists: Lists) -> PageMoves:
    (out, _), dropped, copies, *each = lists
    sequences = [(one[0], one[1:]) for one in each]
    return PageMoves(dropped, sequences[:out], sequences[out:], list(zip(copies[::2], copies[1::2], strict=True)))


def batch_to_lists(batch: Batch) -> Lists:
    """Waits for the device, which measurements are worth."""
    table = batch.page_table
    tensors = (batch.ids, batch.positions, batch.kv_slots, table.flatten(), batch.context_lengths, batch.query_starts)
    ancestors = [] if batch.ancestors is None else batch.ancestors.tolist()
    return [[batch.max_queries, table.shape[0]], *(tensor.tolist() for tensor in tensors), ancestors]


def batch_from_lists(lists: Lists, device: torch.device) -> Batch:
    (max_queries, sequences), *columns = lists

    def numbers(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    ids, positions, kv_slots, table, contexts, starts, ancestors = columns
    return Batch(
        ids=numbers(ids),
        positions=numbers(positions),
        kv_slots=numbers(kv_slots),
        page_table=numbers(table, torch.int32).view(sequences, -1),
        context_lengths=numbers(contexts, torch.int32),
        query_starts=numbers(starts, torch.int32),
        max_queries=max_queries,
        ancestors=numbers(ancestors) if ancestors else None,
        host_lengths=(starts, contexts),
    )
