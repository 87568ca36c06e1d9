"""An MLP with experts: a router chooses some of them for every token, and their weighted outputs are added up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quantkit.kernels.reference.experts import add_shared_expert, choose_experts, sum_of_experts
from quantkit.runtime.model.layers import DenseMlp, Linear, RunDense
from quantkit.stages import Routing


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token runs through, and how much of it counts; without a gate, all."""

    mlp: DenseMlp
    gate: Linear | None


@dataclass(frozen=True)
class ExpertMlp:
    """Experts of one layer by their numbers, and the router that chooses `per_token` of them."""

    router: Linear
    experts: tuple[DenseMlp, ...]
    per_token: int
    routing: Routing
    shared: SharedExpert | None
    correction: Tensor | None = None  # float32 [experts], where the routing has one

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those that may be quantized: neither router nor gate."""
        mlps = self.experts if self.shared is None else (*self.experts, self.shared.mlp)
        return tuple(linear for mlp in mlps for linear in mlp.linears)

    def __call__(self, x: Tensor, run: RunDense) -> Tensor:
        chosen, weights = self._choice(x)
        routed = sum_of_experts(x, chosen, weights, [partial(run, expert) for expert in self.experts])
        if self.shared is None:
            return routed
        gate = None if self.shared.gate is None else self.shared.gate(x)
        return add_shared_expert(routed, run(self.shared.mlp, x), gate)

    def _choice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.routing
        return choose_experts(
            self.router(x.float() if routing.float32 else x),
            self.per_token,
            normalized=routing.normalized,
            scoring=routing.scoring,
            correction=self.correction,
            groups=routing.groups,
            groups_chosen=routing.groups_chosen,
            scale=routing.scale,
        )
