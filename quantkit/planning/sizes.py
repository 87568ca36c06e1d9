"""The schemes of a plan, and how many bytes their layers will have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quantkit.formats import Format, Shape
from quantkit.planning.plan import SchemePlan


def schemes_of(
    chosen: Mapping[str, Format], shapes: Mapping[str, Shape], target_bits: float | None
) -> tuple[SchemePlan, ...]:
    """The distinct schemes in the order of their first layer; one for all where the run is to find them."""
    members: dict[str, list[str]] = {}
    for module, fmt in chosen.items():
        scheme = fmt.describe() if target_bits is None else f"{target_bits:g} bits on average, chosen during the run"
        members.setdefault(scheme, []).append(module)
    found = []
    for scheme, modules in members.items():
        weights = sum(math.prod(shapes[module]) for module in modules)
        size = sum(chosen[module].nbytes(shapes[module]) for module in modules)
        if target_bits is not None:
            size = round(target_bits * weights / 8)
        found.append(SchemePlan(scheme, len(modules), weights, size))
    return tuple(found)
