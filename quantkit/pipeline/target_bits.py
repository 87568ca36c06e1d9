"""What `target_bits` may ask for: how many bits each stage of layers takes by scheme, and which averages can be met."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, Shape
from quantkit.methods.sensitivity import candidates
from quantkit.stages import Group

Sizes = Mapping[IntegerFormat, int]  # bits that a stage takes in all, by scheme


def check_target(
    target: float, groups: Iterable[Group], plan: Mapping[str, Format | None], shapes: Mapping[str, Shape]
) -> None:
    """Refuses more or fewer bits than these groups of layers can take."""
    weights = sum(math.prod(shapes[module]) for module, fmt in plan.items() if fmt is not None)
    sizes = stage_sizes(groups, plan, shapes)
    least, most = (sum(pick(size.values()) for size in sizes) / weights for pick in (min, max))
    if not least <= target <= most:
        raise InputError(
            f"target_bits is {target:g}, but the layers of this model take {math.ceil(100 * least) / 100:.2f} to "
            f"{math.floor(100 * most) / 100:.2f} bits per weight, scales and all; choose a number in between"
        )


def stage_sizes(groups: Iterable[Group], plan: Mapping[str, Format | None], shapes: Mapping[str, Shape]) -> list[Sizes]:
    """Of the groups to quantize; the layers of one share their scheme."""
    chosen = [group for group in groups if plan[group[0]] is not None]
    return [_sizes(as_integer(plan[group[0]]), [shapes[module] for module in group]) for group in chosen]


def _sizes(fmt: IntegerFormat, shapes: list[Shape]) -> Sizes:
    return {scheme: sum(8 * scheme.nbytes(shape) for shape in shapes) for scheme in candidates(fmt, shapes[0][1])}


def as_integer(fmt: Format | None) -> IntegerFormat:
    assert isinstance(fmt, IntegerFormat)  # recipes allow target_bits only there
    return fmt
