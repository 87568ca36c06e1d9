"""Who computes a case: quantkit's own kernels, and what `peers.py` finds installed beside them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.eval.kernels.problems import AttentionProblem, LinearProblem, Problem
from quantkit.kernels.linear import op
from quantkit.kernels.reference import attention as attention_reference

Compute = Callable[[], Tensor]


class Contender(ABC):
    """One way to compute a problem. `remedy` says how to get it where it is not installed."""

    name: ClassVar[str]
    remedy: ClassVar[str] = ""

    def installed(self) -> bool:
        return True

    @abstractmethod
    def supports(self, problem: Problem) -> bool:
        """Whether it takes this problem at all."""

    @abstractmethod
    def prepare(self, problem: Problem) -> Compute:
        """Its own copy of the data, laid out as it wants it; calling the result computes the output."""

    def captures(self, problem: Problem) -> bool:
        """Whether a CUDA graph can hold the call."""
        return True

    def explain(self, problem: Problem) -> str:
        """Which kernel runs, and why, in one line: `kernel: why`."""
        return self.name


class Quantkit(Contender):
    """The kernels of this package; on a CPU their meaning in plain torch, which is what the runtime uses there."""

    name = "quantkit"

    def supports(self, problem: Problem) -> bool:
        return True

    def prepare(self, problem: Problem) -> Compute:
        return _prepare_attention(problem) if isinstance(problem, AttentionProblem) else _prepare_linear(problem)

    def explain(self, problem: Problem) -> str:
        if isinstance(problem, AttentionProblem):
            return _explain_attention(problem)
        fmt, quantized = problem.weight.fmt, problem.weight.quantized
        if fmt is None or quantized is None:
            plain = op.prepare_plain(problem.weight.dense)
            return op.explain(plain, problem.case.tokens) if plain else "torch matmul: the weight is not quantized"
        prepared = op.prepare(fmt, quantized, problem.x.dtype)
        return op.explain(prepared, problem.case.tokens)


def _prepare_linear(problem: LinearProblem) -> Compute:
    x, weight = problem.x, problem.weight
    # Poison: an output that a kernel forgets to write shows in the comparison.
    out = torch.full((problem.case.tokens, problem.case.outputs), float("nan"), dtype=x.dtype, device=x.device)
    if weight.fmt is None or weight.quantized is None:
        dense = weight.dense.clone()
        plain = op.prepare_plain(dense)
        return (lambda: op.linear(x, plain, out=out)) if plain else lambda: torch.mm(x, dense.mT, out=out)
    prepared = copy.deepcopy(op.prepare(weight.fmt, weight.quantized, x.dtype))  # shares nothing with other copies
    return lambda: op.linear(x, prepared, out=out)


def _prepare_attention(problem: AttentionProblem) -> Compute:
    batch, case = copy.deepcopy(problem.batch), problem.case
    q = batch.tensors[0]
    if q.device.type != "cuda":
        return lambda: attention_reference.attend(*batch.tensors, **batch.options).to(q.dtype)
    from quantkit.kernels.attention.attend import attend

    out = torch.full_like(q, float("nan"))
    how: dict[str, Any] = batch.options | {
        "max_queries": case.new,
        "max_context": case.length,
        "out": out,
        "scratch": problem.scratch,
    }
    return lambda: attend(*batch.tensors, **how)


def _explain_attention(problem: AttentionProblem) -> str:
    case = problem.case
    if problem.batch.tensors[0].device.type != "cuda":
        return "reference: kernels run on GPUs"
    from quantkit.kernels.attention.attend import plan

    chosen = plan(case.tokens, case.batch, case.new, case.heads // case.kv_heads)
    names = ["decode"] * (chosen.decode_rows > 0) + ["prefill"] * chosen.prefill
    return f"{' and '.join(names)}: {case.new} new tokens a sequence, {case.heads // case.kv_heads} heads a KV head"
