"""What a comparison has measured, as values: one `FormatResult` for each format, all of them in a `Comparison`.

Every part of a result is optional: it is None until it is measured, and stays None where it does not apply (a shape
with random weights has no quality) or where the format failed before. JSON there and back gives the same value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from quantkit.eval.quality.measure import QualityResult
from quantkit.provenance import Provenance

VERSION = 1  # of report.json


@dataclass(frozen=True)
class Size:
    """Of the weights on disk; of a shape, in memory."""

    bytes: int
    bits_per_weight: float  # of the layers that the format quantizes, scales and all; of everything where none is


@dataclass(frozen=True)
class Making:
    """How long `quantkit quantize` took: reading, writing, verification and its own look at quality included."""

    seconds: float
    peak_bytes: int | None  # of GPU memory; None on a CPU
    calibration: dict[str, Any] | None  # the data that the method saw


@dataclass(frozen=True)
class LayerDamage:
    """Relative errors, see eval/quality/layer_errors.py. Lists have one number for each block."""

    linears: dict[str, list[float | None]]  # by the name inside the block, such as `q_proj`; None: not quantized
    blocks: list[float]


@dataclass(frozen=True)
class Speed:
    """One load of `quantkit bench engine`."""

    batch: int
    prompt: int
    new: int
    tokens_per_second: float
    first_token_ms: float  # median
    gap_ms: float  # median time between two tokens of an answer
    percent_of_limit: float | None  # of what reading weights and cache once would allow; None on a CPU


@dataclass(frozen=True)
class Running:
    """The engine of a format: how it started, what it holds, how fast it is."""

    weights_bytes: int
    kv_tokens: int  # that fit beside the weights
    peak_bytes: int | None  # of GPU memory, cache included; None on a CPU
    ready_seconds: float
    speeds: tuple[Speed, ...]


@dataclass(frozen=True)
class Sample:
    """A greedy continuation."""

    prompt: str
    text: str


@dataclass(frozen=True)
class FormatResult:
    """One format of the model. `name` is the recipe's, or the dtype for the unquantized model."""

    name: str
    description: str  # such as `W4 g128 sym`
    baseline: bool = False
    commands: tuple[str, ...] = ()  # that do the same by hand
    error: str | None = None  # why it stopped; what was measured before is there
    size: Size | None = None
    making: Making | None = None
    quality: QualityResult | None = None  # on quantkit's runtime, against the unquantized model
    reference_quality: QualityResult | None = None  # the same on transformers with decoded weights
    damage: LayerDamage | None = None
    running: Running | None = None
    samples: tuple[Sample, ...] = ()
    provenance: Provenance | None = None  # None for a shape, and where there is no checkpoint

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> FormatResult:
        values = {one.name: given[one.name] for one in fields(cls) if one.name in given}
        for name, kind in (("size", Size), ("making", Making), ("damage", LayerDamage)):
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        for name in ("quality", "reference_quality"):
            if values.get(name) is not None:
                values[name] = QualityResult.from_dict(values[name])
        if values.get("running") is not None:
            speeds = tuple(Speed(**speed) for speed in values["running"]["speeds"])
            values["running"] = Running(**(values["running"] | {"speeds": speeds}))
        if values.get("provenance") is not None:
            values["provenance"] = Provenance.from_dict(values["provenance"])
        values["samples"] = tuple(Sample(**sample) for sample in values.get("samples", ()))
        values["commands"] = tuple(values.get("commands", ()))
        return cls(**values)


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    device: str  # the GPU's name, or the processor's
    gpu: bool
    cores: int
    memory_bytes: int  # of the device that computes
    software: dict[str, str]  # package -> version, Python included


@dataclass(frozen=True)
class Comparison:
    """Everything that a report says."""

    model: str
    family: str
    parameters: int
    machine: Machine
    date: str
    command: str  # that makes this report again
    seed: int
    formats: tuple[FormatResult, ...] = field(default=())
    notes: tuple[str, ...] = ()  # what a reader must know, such as that speeds are a CPU's

    @property
    def baseline(self) -> FormatResult | None:
        return next((found for found in self.formats if found.baseline), None)

    def to_dict(self) -> dict[str, Any]:
        formats = [found.to_dict() for found in self.formats]
        return {"version": VERSION} | asdict(self) | {"formats": formats}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Comparison:
        values = {one.name: given[one.name] for one in fields(cls)}
        values["machine"] = Machine(**values["machine"])
        values["formats"] = tuple(FormatResult.from_dict(found) for found in values["formats"])
        values["notes"] = tuple(values["notes"])
        return cls(**values)
