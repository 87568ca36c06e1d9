"""Activations of long rows: what rounds them holds a whole row, so it is compiled for the length of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from compile_matrix.case import Case
from compile_matrix.weights import served_on, weight_of
from pairwise import cover
from quantkit.kernels.card import Card
from quantkit.kernels.linear import op

OUTPUTS = 128  # the matmul after it stays cheap
INPUTS = (14_336, 18_944, 28_672, 53_248)  # of Llama-3's down layers in three sizes, and of Qwen2.5-7B's
TOKENS = (1, 2, 8, 12, 40, 100, 300)  # one or more for every way to share the rows out
WITH_OUTLIERS = "llm-int8"  # looks at all tokens at once, so that every length meets every number of them
OTHERS = ("w8a8", "fp8", "fp8-static", "fp8-block")


def long_row_cases(card: Card) -> Iterator[Case]:
    others = [name for name in OTHERS if name in served_on(card)]
    chosen = cover(others, INPUTS, TOKENS) if len(others) > 1 else list(product(others, INPUTS, TOKENS))
    for name, inputs, tokens in [*product((WITH_OUTLIERS,), INPUTS, TOKENS), *chosen]:
        launch = lambda dtype, how=(name, inputs, tokens): _run(*how, card, dtype)  # noqa: E731
        yield Case(f"{name} rows of {inputs} for {tokens}", launch, slow=True)


def _run(name: str, inputs: int, tokens: int, card: Card, dtype: torch.dtype) -> None:
    weight = weight_of(name, OUTPUTS, inputs)
    op.run(weight.default(tokens, card, dtype), torch.zeros(tokens, inputs, dtype=dtype), weight)
