"""What a pass makes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantkit.formats import Format, QuantizedWeight


@dataclass(frozen=True)
class QuantizedLayer:
    """What a method made of one layer, with what it wants logged."""

    module: str
    fmt: Format
    quantized: QuantizedWeight
    relative_error: float  # ||decoded - original|| / ||original||; says little about quality
    log: Mapping[str, Any]


@dataclass(frozen=True)
class QuantizedBlock:
    """The quantized layers of one decoder block, and its plain tensors that had to change with them."""

    layers: tuple[QuantizedLayer, ...]
    changed: Mapping[str, Tensor] = field(default_factory=dict)


def relative_error(decoded: Tensor, original: Tensor) -> float:
    return float(distance(decoded, original))


def distance(decoded: Tensor, original: Tensor) -> Tensor:
    """The relative error, still on its device."""
    original = original.float()
    relative: Tensor = (decoded.float() - original).norm() / original.norm().clamp(min=1e-30)
    return relative
