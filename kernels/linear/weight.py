"""What a weight of a linear layer and its kernels are to `op.py`, `dispatch.py`, `tuning.py` and `fuse.py`.

Each room (`weight_only/`, `eight_bit/`, `dense/`) has a weight class that owns its dispatch: under which kind tables
list it, which kernels it has, what runs where nothing was measured, what is worth measuring, what it can be joined
with. A kernel's file registers it as a `Kernel`. Nobody else asks for a weight's class or a kernel's name, so a new
room needs no edit here. Nothing here needs Triton; rooms import their kernels when they are asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from quantkit.kernels.card import Card

CHUNK = 128  # inputs are padded to a multiple of this
ROWS = 128  # outputs are padded to a multiple of this, so that no kernel masks its loads of weights
TICKETS = 4096  # of a weight: which split of the inputs is the last to arrive


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def always(weight: Any, dtype: torch.dtype) -> bool:
    return True


@dataclass(frozen=True)
class Kernel:
    """One way to multiply with weights of one class.

    name      in tables
    matmul    (x, weight, config, *, bias, out) -> y; without config where there is nothing to choose
    config    a frozen dataclass of numbers, which follow the name in tables; None: there is nothing to choose
    supports  (weight, dtype) -> whether a measured entry, perhaps of a relative, runs for tokens of this dtype. What
              depends on the GPU alone needs no answer: tables are measured on the GPU that reads them
    """

    name: str
    matmul: Callable[..., Tensor]
    config: Callable[..., Any] | None = None
    supports: Callable[[Any, torch.dtype], bool] = always

    def run(self, x: Tensor, weight: Any, config: Any, bias: Tensor | None, out: Tensor | None) -> Tensor:
        how = () if self.config is None else (config,)
        return self.matmul(x, weight, *how, bias=bias, out=out)


def by_name(*kernels: Kernel) -> Mapping[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels}


@dataclass(frozen=True)
class Choice:
    """A kernel by its name among the weight's own, how it cuts the work, and the reason in words."""

    kernel: str
    config: Any  # of the class that the kernel registers; None where it registers none
    why: str


class LinearWeight(Protocol):
    """A weight in the order of its kernels."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> str:
        """Under which name tables list it; weights of one kind run the same code."""

    @property
    def relatives(self) -> tuple[str, ...]:
        """Kinds whose measurements serve where its own has none: the same work per weight, or nearly."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of tokens that are measured; each stands for all from the one before on."""

    @property
    def token_dtype(self) -> torch.dtype:
        """Of the tokens that it is measured with."""

    @property
    def output_unit(self) -> int:
        """Outputs of weights before others in one that is joined are a multiple of this."""

    @property
    def kernels(self) -> Mapping[str, Kernel]: ...

    def bucket(self, tokens: int) -> int | None:
        """The bucket that stands for this many tokens; None where no table is asked."""

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        """What runs where no table says it, on such a GPU and for tokens of this dtype."""

    def candidates(self, tokens: int) -> Iterator[Choice]:
        """Everything worth a measurement for this many tokens, one of the buckets."""

    def join(self, others: Sequence[LinearWeight]) -> LinearWeight | None:
        """One weight with the outputs of this one and of others; None where they do not fit together."""


class Untuned:
    """The part of `LinearWeight` that weights have in common which no table lists, and which are never joined."""

    kind: str = ""
    relatives: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()
    token_dtype: torch.dtype = torch.bfloat16

    @property
    def output_unit(self) -> int:
        return ROWS

    def bucket(self, tokens: int) -> int | None:
        return None

    def candidates(self, tokens: int) -> Iterator[Choice]:
        return iter(())

    def join(self, others: Sequence[LinearWeight]) -> Self | None:
        return None


def shape_of(weight: LinearWeight) -> str:
    """As tables spell it."""
    return f"{weight.outputs}x{weight.inputs}"


def unmeasured(weight: LinearWeight) -> str:
    """Why a default runs."""
    return f"no measurement of {weight.kind} {shape_of(weight)} on this GPU"
