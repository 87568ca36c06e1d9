"""What `quantkit plan` is asked, beside the model and the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.plan.model import Cache
from quantkit.eval.plan.roofline import MAX_BATCH, mean_context
from quantkit.runtime.core.kv_dtypes import KV_DTYPES, check_kv_dtype, kv_kind

ANSWER = 256  # tokens, as `quantkit bench engine` has it


@dataclass(frozen=True)
class Question:
    context: int = 4096  # tokens of one request, prompt and answer
    batches: tuple[int, ...] = (1, 8, 32, 128)
    kv_dtype: str = "auto"
    price_per_hour: float | None = None
    efficiency: float = 1.0  # share of the ceiling that the user expects to reach
    answer: int | None = None  # tokens of the context that are the answer; None: ANSWER, at most half the context

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise InputError(f"unknown kv dtype '{self.kv_dtype}'; {did_you_mean(self.kv_dtype, KV_DTYPES)}")
        if self.context < 1:
            raise InputError(f"--context is {self.context}, but must be 1 or more tokens")
        if not self.batches or not all(1 <= batch <= MAX_BATCH for batch in self.batches):
            raise InputError(f"--batch is {list(self.batches)}, but must be numbers from 1 to {MAX_BATCH}")
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise InputError(f"--price-per-hour is {self.price_per_hour:g}, but must be more than 0")
        if not 0 < self.efficiency <= 1:
            raise InputError(f"--efficiency is {self.efficiency:g}, but must be more than 0 and at most 1")

        if self.answer is not None and not 1 <= self.answer < self.context:
            most = f"leave room for a prompt in a context of {self.context}"
            raise InputError(f"--new-tokens is {self.answer}, but must be 1 or more tokens and {most}")

    @property
    def new(self) -> int:
        """Tokens of an answer."""
        return self.answer or max(1, min(ANSWER, self.context // 2))

    @property
    def prompt(self) -> int:
        return max(1, self.context - self.new)

    @property
    def mean_context(self) -> int:
        """Of the steps of a request; the first token comes with the prompt."""
        return mean_context(self.prompt, self.new)

    def itemsize(self, cache: Cache) -> Fraction:
        """Bytes that a cache takes for each of its numbers, what says what codes mean included."""
        check_kv_dtype(self.kv_dtype, (1 if cache.kind == "MLA" else 2, 1, cache.width))
        return Fraction(kv_kind(self.kv_dtype, torch.bfloat16).token_bytes(cache.width), cache.width)
