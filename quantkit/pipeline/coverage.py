"""How many calibration tokens reached each expert of a model: what is known of one that saw none is little."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

NAMED = 5  # experts that a warning names; the log has all


class _Layer(Protocol):
    @property
    def module(self) -> str: ...
    @property
    def log(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Coverage:
    """By the names of experts; there is at least one."""

    tokens: Mapping[str, int]
    starved: tuple[str, ...]  # too few tokens: rounded by inputs of their whole block

    @property
    def unreached(self) -> int:
        return sum(not count for count in self.tokens.values())

    def describe(self) -> str:
        counts = sorted(self.tokens.values())
        return (
            f"{len(counts):,}; calibration tokens that reached one: least {counts[0]:,}, "
            f"median {median(counts):,.0f}, most {counts[-1]:,}; rounded by inputs of their whole block: "
            f"{len(self.starved):,}"
        )

    @property
    def warning(self) -> str | None:
        if not self.starved:
            return None
        named = ", ".join(self.starved[:NAMED]) + (", ..." if len(self.starved) > NAMED else "")
        return (
            f"{len(self.starved):,} of {len(self.tokens):,} experts were reached by too few calibration tokens "
            f"({self.unreached:,} by none) and were rounded by inputs of their whole block: {named}; "
            "more text, or other text, would reach them"
        )


def coverage_of(layers: Iterable[_Layer]) -> Coverage | None:
    """From what a run logged of its layers; None where it looked at no expert."""
    tokens: dict[str, int] = {}
    starved: dict[str, None] = {}
    for layer in layers:
        if "expert_tokens" in layer.log:
            expert = layer.module.rpartition(".")[0]
            tokens[expert] = int(layer.log["expert_tokens"])
            if "pooled_tokens" in layer.log:
                starved[expert] = None
    return Coverage(tokens, tuple(starved)) if tokens else None
