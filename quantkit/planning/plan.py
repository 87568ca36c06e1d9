"""The values that a plan consists of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from quantkit.engines import Verdict


@dataclass(frozen=True)
class ModelFacts:
    """The model as it is."""

    name: str
    model_type: str
    dtype: str
    blocks: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class MethodFacts:
    """What is done to it."""

    recipe: str
    name: str
    options: dict[str, Any]
    calibrated: bool
    samples: int  # as asked for; a short text may have fewer
    seq_len: int
    mix: dict[str, int] = field(default_factory=dict)  # of several sources: how many of the samples each gives


@dataclass(frozen=True)
class SchemePlan:
    """The layers that share a scheme."""

    scheme: str  # such as `W4 g128 sym`
    layers: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class OutputFacts:
    """What will be written."""

    format: str
    schemes: tuple[SchemePlan, ...]
    kept: tuple[str, ...]  # linears of the blocks that stay as they are; lm_head always does
    bytes: int
    bits_per_weight: float  # of the quantized layers, scales and all
    target_bits: float | None  # where it is given, each layer's bits are found during the run
    kv_scales: str | None = None  # how many scales an FP8 cache gets


@dataclass(frozen=True)
class Need:
    """Bytes that a run takes of something, and what there is of it; None where that is not known."""

    needed: int
    available: int | None

    @property
    def is_short(self) -> bool:
        return self.available is not None and self.needed > self.available


@dataclass(frozen=True)
class Needs:
    """What a run takes."""

    device: str
    disk: Need  # at the worst moment, beside the output
    ram: Need
    gpu: Need | None
    seconds: float  # about


@dataclass(frozen=True)
class QuantizePlan:
    """What a run would do, what it needs, and who will load what it writes."""

    model: ModelFacts
    method: MethodFacts
    output: OutputFacts
    needs: Needs
    engines: tuple[Verdict, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"engines": [verdict.to_dict() for verdict in self.engines]}
