"""A weight that is not quantized, as its kernel reads it: 16 bit, as stored, and the tickets that splits take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels.card import Card
from quantkit.kernels.checks import HALVES
from quantkit.kernels.linear.dispatch import bucket_of
from quantkit.kernels.linear.weight import ROWS, TICKETS, Choice, Kernel, LinearWeight

BUCKETS = (1, 8, 16, 32, 64)  # tokens; more are cuBLAS's


@dataclass(frozen=True)
class HalfWeight:
    """`values` is the layer's own tensor, not a copy of it."""

    values: Tensor  # bfloat16 or float16 [outputs, inputs], contiguous
    tickets: Tensor  # int32, zero between calls

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return 2 * self.values.numel()

    @property
    def kind(self) -> str:
        return "bf16" if self.values.dtype == torch.bfloat16 else "fp16"

    @property
    def relatives(self) -> tuple[str, ...]:
        return ("bf16",)

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS

    @property
    def output_unit(self) -> int:
        return ROWS

    @property
    def token_dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        from quantkit.kernels.linear.dense.choices import KERNELS  # needs Triton

        return KERNELS

    def bucket(self, tokens: int) -> int | None:
        return None if tokens > BUCKETS[-1] else bucket_of(tokens, BUCKETS)

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        from quantkit.kernels.linear.dense.choices import default

        return default(self, tokens, card)

    def candidates(self, tokens: int) -> Iterator[Choice]:
        from quantkit.kernels.linear.dense.choices import candidates

        return candidates(self, tokens)

    def join(self, others: Sequence[LinearWeight]) -> HalfWeight | None:
        """Never: plain layers that read one input are loaded as one matrix."""
        return None


def supports(weight: Tensor) -> bool:
    """Whether the kernel takes this weight; others are torch's."""
    return weight.dtype in HALVES and weight.ndim == 2 and weight.is_contiguous() and weight.numel() > 0


def lay_out(weight: Tensor) -> HalfWeight:
    return HalfWeight(weight, torch.zeros(TICKETS, dtype=torch.int32, device=weight.device))
