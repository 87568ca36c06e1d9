"""The benchmark itself: for every case check the result, then time it and its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.eval.kernels.cases import Case
from quantkit.eval.kernels.contenders import Contender, Quantkit
from quantkit.eval.kernels.problems import LinearProblem, Problem, make_problems
from quantkit.eval.kernels.results import Measured, Report
from quantkit.eval.kernels.timing import Clock, Limits, Times
from quantkit.kernels.linear.arithmetic import rounds_to_float8
from quantkit.kernels.reference.compare import FLOAT8_STEPS, LARGEST_ERROR, ROUNDED_INPUTS, relative_error

PEER_ERROR = 0.05  # peers may round inputs and scales in their own way, but must compute the same thing
OURS: Contender = Quantkit()


@dataclass
class Bench:
    """Measures cases on one clock; what peers could not do is collected in `notes`."""

    clock: Clock
    peers: Sequence[Contender]
    ours: Contender
    notes: list[str] = field(default_factory=list)

    @torch.no_grad()
    def run(self, cases: Sequence[Case], limits: Limits, on_row: Callable[[Measured], None]) -> Report:
        """`on_row` sees every case as soon as it is measured."""
        rows = []
        for problem in make_problems(cases, self.clock.device):
            rows.append(self.measure(problem))
            on_row(rows[-1])
        return Report(tuple(rows), limits, self.clock.describe(), self.clock.repeat, tuple(self.notes))

    def measure(self, problem: Problem) -> Measured:
        explanation = self.ours.explain(problem)
        largest = self._largest_error(problem)
        error = compare(problem, self.ours.prepare(problem)())
        if not error <= largest:  # NaN is not
            return Measured(problem.case, explanation, error, None, {})
        times, error = self._time(self.ours, problem)
        if not error <= largest:  # right once, and wrong after many calls
            return Measured(problem.case, explanation, error, None, {})
        found = {peer.name: self._time_peer(peer, problem) for peer in self.peers if peer.supports(problem)}
        peers = {name: peer_times for name, peer_times in found.items() if peer_times is not None}
        return Measured(problem.case, explanation, error, times, peers)

    def _largest_error(self, problem: Problem) -> float:
        if isinstance(problem, LinearProblem) and problem.case.fmt and rounds_to_float8(problem.case.fmt):
            return FLOAT8_STEPS
        if self.clock.device.type == "cpu" and problem.case.dtype != "float32":
            return ROUNDED_INPUTS
        return LARGEST_ERROR[problem.case.dtype]

    def _time(self, contender: Contender, problem: Problem) -> tuple[Times, float]:
        """The times, and the error of a call after all of them."""
        copies = self.clock.copies(problem.case.cold_bytes)
        calls = [contender.prepare(problem) for _ in range(copies)]
        times = self.clock.time(calls, capture=contender.captures(problem))
        return times, compare(problem, calls[-1]())

    def _time_peer(self, peer: Contender, problem: Problem) -> Times | None:
        """A peer that fails is left out and noted: it must not cost the other results."""
        where = f"{peer.name} at {problem.case.name}"
        try:
            times, error = self._time(peer, problem)
        except Exception as failure:  # whatever a foreign package may raise
            reason = str(failure).strip().partition("\n")[0][:200]
            self.notes.append(f"{where} failed: {type(failure).__name__}: {reason}")
            return None
        if not error <= PEER_ERROR:
            self.notes.append(f"{where} is not compared: it gives other numbers, relative error {error:.2g}")
            return None
        return times


def compare(problem: Problem, result: Tensor) -> float:
    """The relative error of the compared part; NaN where the output is not whole or anything in it not finite."""
    if result.numel() != problem.size or not bool(torch.isfinite(result).all()):
        return float("nan")
    return relative_error(problem.pick(result), problem.exact)
