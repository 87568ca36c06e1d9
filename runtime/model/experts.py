"""An MLP with experts: a router chooses some of them for every token, and their weighted outputs are added up.

On a GPU the experts of a layer are stacked and routed kernels run (`GroupedMlp`). `ExpertMlp` computes one expert after
the other: on a CPU, and on a GPU in formats without a routed kernel, where every expert then sees every token, because
the host does not know who was chosen.

Where ranks divide experts, each has some whole, chooses for all tokens as the others do, and computes what its own add:
a term of the sum that the decoder makes over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from quantkit.kernels.card import runs_kernels
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.grouped.routes import Rule
from quantkit.kernels.linear.grouped.weight import Clip, GroupedWeight
from quantkit.kernels.reference.experts import (
    add_shared_expert,
    choose_experts,
    sum_of_every_expert,
    sum_of_experts,
)
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
    first: int = 0  # the number of the first of these experts

    gives_term: ClassVar[bool] = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those that may be quantized: neither router nor gate."""
        mlps = self.experts if self.shared is None else (*self.experts, self.shared.mlp)
        return tuple(linear for mlp in mlps for linear in mlp.linears)

    def __call__(self, x: Tensor, run: RunDense) -> Tensor:
        chosen, weights = self._choice(x)
        add_up = sum_of_every_expert if runs_kernels(x.device) else sum_of_experts
        routed = add_up(x, chosen, weights, [partial(run, expert) for expert in self.experts], self.first)
        if self.shared is None:
            return routed
        gate = None if self.shared.gate is None else self.shared.gate(x)
        return add_shared_expert(routed, run(self.shared.mlp, x), gate)

    def _choice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x.float() if self.routing.float32 else x)
        return choose_experts(logits, **vars(rule_of(self.per_token, self.routing)), correction=self.correction)


@dataclass(frozen=True)
class GroupedMlp:
    """The same with all experts as two weights, for routed kernels."""

    router: Linear
    gate_up: GroupedWeight
    down: GroupedWeight
    rule: Rule
    activation: str
    shared: SharedExpert | None
    correction: Tensor | None = None  # float32 [experts], where the routing has one
    clip: Clip | None = None
    float32: bool = False  # logits are computed in it
    first: int = 0  # the number of the first of these experts

    gives_term: ClassVar[bool] = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        """That are no experts'; routed kernels choose by tables of their own."""
        return () if self.shared is None else self.shared.mlp.linears

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def share_of_token(self) -> float:
        """Of the experts, that one token is sent to."""
        return self.rule.per_token / self.router.outputs

    def __call__(self, x: Tensor, run: RunDense) -> Tensor:
        from quantkit.kernels.linear.grouped.experts import sum_of_experts  # needs Triton

        shared = gate = None
        if self.shared is not None:
            shared = run(self.shared.mlp, x)
            gate = None if self.shared.gate is None else self.shared.gate(x)
        return sum_of_experts(
            x,
            self.scorer,
            self.gate_up,
            self.down,
            self.rule,
            self.activation,
            clip=self.clip,
            correction=self.correction,
            shared=shared,
            gate=gate,
            first=self.first,
            experts=self.router.outputs,
        )

    @property
    def scorer(self) -> HalfWeight | Callable[[Tensor], Tensor]:
        """The router as kernels take it: its weight where that is all, else what computes logits."""
        weight, plain = self.router.served[0], self.router.bias is None and not self.float32
        return weight if plain and isinstance(weight, HalfWeight) else self._logits

    def _logits(self, x: Tensor) -> Tensor:
        return self.router(x.float() if self.float32 else x)


def rule_of(per_token: int, routing: Routing) -> Rule:
    """What kernels ask of a routing beside its tensors."""
    return Rule(per_token, routing.normalized, routing.scoring, routing.groups, routing.groups_chosen, routing.scale)
