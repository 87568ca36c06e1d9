"""Operations for a byte: what a GPU could do (its ridge point), and what each phase asks of it.

Below the ridge point a phase waits for memory, above for arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.eval.plan.gpus import Gpu
from quantkit.eval.plan.roofline import Ceiling


def ridge_points(gpu: Gpu) -> dict[str, float]:
    """Operations a byte at which computing takes as long as reading, by arithmetic; those that it has units for."""
    rates = {"bf16": gpu.bf16, "fp8": gpu.fp8, "int8": gpu.int8}
    return {name: rate / gpu.bandwidth for name, rate in rates.items() if rate is not None}


@dataclass(frozen=True)
class Phase:
    """A prompt, or a step of decoding; with the arithmetic that most of its operations run in."""

    name: str
    operations: int
    bytes: int
    arithmetic: str
    ridge: float

    @property
    def per_byte(self) -> float:
        return self.operations / self.bytes

    @property
    def bound(self) -> str:
        return "memory" if self.per_byte < self.ridge else "compute"

    def to_dict(self) -> dict[str, object]:
        return {
            "phase": self.name,
            "operations": self.operations,
            "bytes": self.bytes,
            "operations_per_byte": self.per_byte,
            "ridge_point": self.ridge,
            "bound": self.bound,
        }


def phases(ceiling: Ceiling, prompt: int, context: int, batches: tuple[int, ...]) -> tuple[Phase, ...]:
    """One prompt, and steps of so many requests."""
    weights, gpu = ceiling.weights, ceiling.gpu
    arithmetic = weights.arithmetic
    ridge = gpu.rate(arithmetic) / gpu.bandwidth
    operations = ceiling.prompt_operations(prompt)
    first = Phase(f"prompt of {prompt:,}", operations, weights.read_for(prompt), arithmetic, ridge)
    steps = (
        Phase(
            f"step of {batch:,}",
            ceiling.decode_operations(batch, context),
            ceiling.decode(batch, context).bytes,
            arithmetic,
            ridge,
        )
        for batch in dict.fromkeys(batches)
    )
    return first, *steps
