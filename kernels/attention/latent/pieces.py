"""Pieces of prompts whose keys and values are made of latents together: which tokens they need, where these lie, and
how much memory that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

PIECE_ROWS = 16_384  # tokens of all contexts that are expanded together; a longer context is alone
EXPANDED_BYTES = 128 << 20  # of their keys and values at a time
_INDEX_BYTES = 48  # of whatever leads to a row


@dataclass(frozen=True)
class PromptPieces:
    """New tokens of some sequences of a step. Tensors are on the device, numbers are known to the host.

    Contexts stand behind each other as rows: those of sequence s are first_rows[s] up to first_rows[s + 1].
    """

    num_new: int
    num_rows: int
    kv_slots: Tensor  # int64 [num_rows], of every row in the cache
    first_queries: Tensor  # int32 [sequences], of their new tokens in the step
    new_starts: Tensor  # int32 [sequences + 1], how many new tokens those before have
    first_rows: Tensor  # int32 [sequences + 1]


def group_sequences(contexts: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
    """Neighbours of the `wanted` sequences whose contexts have PIECE_ROWS tokens together, or one that has more."""
    groups: list[list[int]] = []
    rows = 0
    for sequence in wanted:
        if not groups or rows + contexts[sequence] > PIECE_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(sequence)
        rows += contexts[sequence]
    return groups


def make_pieces(
    sequences: Sequence[int], starts: Sequence[int], contexts: Sequence[int], page_table: Tensor, page_size: int
) -> PromptPieces:
    """The pieces of these sequences of a step. Numbers come from the host, so that nobody waits for the device."""
    new = [starts[sequence + 1] - starts[sequence] for sequence in sequences]
    lengths = [contexts[sequence] for sequence in sequences]
    columns = [list(sequences), [starts[sequence] for sequence in sequences]]
    columns += [list(accumulate(counts, initial=0)) for counts in (new, lengths)]
    host = torch.tensor([number for column in columns for number in column], dtype=torch.int32)
    device = page_table.device
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    # Copies begin on 16 bytes: Triton compiles a kernel again for pointers that do not.
    own, first_queries, new_starts, first_rows = (part.clone() for part in sent.split([len(part) for part in columns]))
    row = torch.arange(sum(lengths), device=device)
    owner = torch.repeat_interleave(first_rows.diff(), output_size=len(row))
    position = row - first_rows[owner]
    kv_slots = page_table[own[owner], position // page_size].long() * page_size + position % page_size
    return PromptPieces(sum(new), len(row), kv_slots, first_queries, new_starts, first_rows)


def scratch_bytes(heads_width: int, kept: int, itemsize: int, max_context: int) -> int:
    """The most that a call takes beside its arguments, where a head's key and value have `heads_width` numbers and a
    token keeps `kept`: rows that were gathered, before and after 8 bits are converted, where they lie, and their keys
    and values."""
    rows = max(PIECE_ROWS, max_context)
    return rows * (kept * (itemsize + 1) + _INDEX_BYTES) + max(EXPANDED_BYTES, rows * heads_width * itemsize)
