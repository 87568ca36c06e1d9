"""What a quantization run reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quantkit.pipeline.coverage import Coverage, coverage_of
from quantkit.pipeline.quality import Quality


@dataclass(frozen=True)
class LayerReport:
    """What became of one linear layer."""

    module: str
    scheme: str
    weights: int
    bytes: int
    relative_error: float  # ||decoded - original|| / ||original||; says little about quality
    log: dict[str, Any]  # what the method measured, such as its loss

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` did."""

    output: str
    recipe: str
    format: str
    source_bytes: int
    bytes: int
    calibration: dict[str, Any] | None  # the data that the method saw
    quality: Quality | None
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()  # what another reader of the result will do otherwise
    touch_up: dict[str, Any] | None = None  # its steps, the best of them, and the KL before and after
    kv_scales: dict[str, Any] | None = None  # of an FP8 cache: how many for a layer, the smallest and the largest

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized layers, scales and all."""
        return 8 * sum(layer.bytes for layer in self.layers) / sum(layer.weights for layer in self.layers)

    @property
    def warnings(self) -> list[str]:
        """What should not go unsaid."""
        found = [f"{layer.module}: {layer.log['warning']}" for layer in self.layers if "warning" in layer.log]
        starved = self.experts and self.experts.warning
        return [*found, starved] if starved else found

    @property
    def experts(self) -> Coverage | None:
        """How well calibration knew the experts; None where none were calibrated."""
        return coverage_of(self.layers)

    def to_dict(self) -> dict[str, Any]:
        quality = self.quality.to_dict() if self.quality else None
        return asdict(self) | {"quality": quality, "bits_per_weight": self.bits_per_weight, "warnings": self.warnings}
