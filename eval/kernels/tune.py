"""Measuring the table of this GPU (kernels/linear/tuning.py) for the layers that are about to be benchmarked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.eval.kernels.cases import Case, LinearCase
from quantkit.eval.kernels.problems import LinearProblem, make_problems
from quantkit.kernels.linear import op
from quantkit.kernels.linear.arithmetic import rounds_to_float8
from quantkit.kernels.reference.compare import FLOAT8_STEPS


@torch.no_grad()
def tune_cases(cases: Sequence[Case], device: torch.device, progress: Callable[[str], None]) -> int:
    """How many kinds and shapes were measured; all of them, known or not."""
    from quantkit.kernels.linear.tuning import tune_once

    layers = {(case.format, case.shape): case for case in cases if isinstance(case, LinearCase)}
    measured = 0
    for problem in make_problems(list(layers.values()), device):
        assert isinstance(problem, LinearProblem)
        fmt, quantized, dense = problem.weight.fmt, problem.weight.quantized, problem.weight.dense
        weight: op.LinearWeight | None
        if fmt is None or quantized is None:
            weight = op.prepare_plain(dense)
        else:
            weight = op.prepare(fmt, quantized, problem.x.dtype)
        if weight is not None:

            def expected(x: Tensor, dense: Tensor = dense, problem: LinearProblem = problem) -> Tensor:
                fmt, quantized = problem.weight.fmt, problem.weight.quantized
                return (x if fmt is None or quantized is None else fmt.served_inputs(x, quantized)) @ dense.mT

            allowed = {"largest_error": FLOAT8_STEPS} if fmt is not None and rounds_to_float8(fmt) else {}
            measured += tune_once(weight, expected, again=True, progress=progress, **allowed)
    return measured
