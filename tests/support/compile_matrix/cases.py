"""Every launch that the engine may make: kernels, and every configuration that dispatch can choose for them.

Tensors are small unless their size is the point: what a kernel is compiled for are its configuration, its dtypes and
which of its arguments are multiples of 16, and for kernels that hold a whole row the length of the row.
"""

from __future__ import annotations

from collections.abc import Iterator

from compile_matrix.attention_cases import attention_cases
from compile_matrix.case import Case
from compile_matrix.grid_cases import grid_cases
from compile_matrix.grouped_cases import grouped_cases
from compile_matrix.linear_cases import linear_cases
from compile_matrix.long_row_cases import long_row_cases
from compile_matrix.small_cases import small_cases
from quantkit.kernels.card import Card


def all_cases(card: Card) -> Iterator[Case]:
    """For a card: others are not asked for what it cannot do."""
    yield from attention_cases(card)
    yield from small_cases(card)
    yield from long_row_cases(card)
    yield from linear_cases(card)
    yield from grouped_cases(card)
    yield from grid_cases(card)
