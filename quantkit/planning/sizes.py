"""How many bytes a layer will have, and all layers together, before any of them is quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Format, Shape
from quantkit.formats.base import ANY_LENGTH
from quantkit.planning.plan import SchemePlan


def layer_shapes(source: Checkpoint, plan: Mapping[str, Format | None]) -> dict[str, Shape]:
    """(out, in) of every linear; refuses layers that are missing or that their format cannot store."""
    shapes = {}
    for module, fmt in plan.items():
        stored = source.tensors.get(f"{module}.weight")
        if stored is None:
            raise InputError(f"{source.folder} has no tensor {module}.weight; the checkpoint is incomplete")
        out, inputs = stored.info.shape
        shapes[module] = (out, inputs)
        if fmt is None:
            continue
        try:
            fmt.check(shapes[module])
        except InputError as error:
            raise InputError(f"{module} [{out} x {inputs}] as {fmt.name} {fmt.describe()}: {error}") from error
    return shapes


@cache
def layer_bytes(fmt: Format, shape: Shape) -> int:
    """Bytes of a quantized layer. A part of unknown length counts as it turns out for one row: right to a few bytes."""
    specs = fmt.parts(shape)
    size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values() if ANY_LENGTH not in spec.shape)
    unknown = [name for name, spec in specs.items() if ANY_LENGTH in spec.shape]
    if unknown:
        row = fmt.encode(torch.linspace(-1, 1, shape[1]).unsqueeze(0))
        size += sum(row[name].nbytes for name in unknown)
    return size


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
        size = sum(layer_bytes(chosen[module], shapes[module]) for module in modules)
        if target_bits is not None:
            size = round(target_bits * weights / 8)
        found.append(SchemePlan(scheme, len(modules), weights, size))
    return tuple(found)
