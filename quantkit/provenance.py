"""Where a model's numbers come from: what its weights were before, and which data a method saw.

Both change what a number means: a model that was trained for rounding loses less by it, and one that was calibrated on
text like the one that judges it, too. The facts are read from what the makers of a folder wrote into it:

    quantization_log.jsonl   `quantkit quantize`: the calibration, and the origin of the model that it began with
    gguf_import.json         `quantkit import`: the file and its types
    training.json            the bundled models: their stages

Others may have written such files, so nothing in them is trusted to be there.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.gguf_view import IMPORT_RECORD
from quantkit.sources import model_folder

QUANTIZATION_LOG = "quantization_log.jsonl"
_TRAINING_RECORD = "training.json"


@dataclass(frozen=True)
class Origin:
    """What unquantized weights were made of."""

    kind: Literal["as given", "trained", "gguf"]
    stages: int = 0  # of training
    noisy_stages: int = 0  # the last ones, under rounding noise
    file: str = ""  # that was imported, or runs as it is
    kept: bool = False  # in the blocks of that file; else its numbers were decoded
    tensor_types: dict[str, int] = field(default_factory=dict)  # of that file -> how many tensors

    def __str__(self) -> str:
        if self.kind == "gguf":
            types = ", ".join(f"{count} x {name}" for name, count in self.tensor_types.items())
            how = "run as it is, the GGUF file" if self.kept else "decoded from the GGUF file"
            return f"{how} {self.file} ({types}), whose losses stay"
        if self.kind == "trained":
            if not self.noisy_stages:
                return "trained for quantkit, without rounding noise"
            last = f"the last {self.noisy_stages} of {self.stages} stages"
            return f"trained for quantkit, {last} under 4-bit rounding noise: it loses less than others by rounding"
        return "as given"


@dataclass(frozen=True)
class CalibrationData:
    """What a method saw of data."""

    kind: Literal["not quantized", "no data", "text", "unknown"]
    source: str = ""
    default: bool = False  # the text that ships, which nobody chose
    samples: int = 0
    seq_len: int = 0
    mix: dict[str, int] = field(default_factory=dict)  # of several sources: how many of the samples each gave

    def __str__(self) -> str:
        if self.kind == "text":
            chosen = "the default text" if self.default else "a mix of" if self.mix else "given text"
            tokens = f"{self.samples:,} samples of {self.seq_len:,} tokens, {self.samples * self.seq_len:,} in all"
            source = ", ".join(f"{count:,} x {name}" for name, count in self.mix.items()) or self.source
            return f"{chosen} {source}, {tokens}"
        if self.kind == "no data":
            return "none, the method looks at weights alone"
        return "unknown, no record of quantkit's in the folder" if self.kind == "unknown" else "none, not quantized"


@dataclass(frozen=True)
class Provenance:
    """What must stand beside a number of a model."""

    origin: Origin  # of the unquantized model
    calibration: CalibrationData

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Provenance:
        return cls(Origin(**given["origin"]), CalibrationData(**given["calibration"]))


def provenance_of(model: str | Path, base: str | Path | None = None) -> Provenance:
    """Of a model that is measured, beside `base` where that is known to be what it was made from."""
    folder = model_folder(model)
    return Provenance(origin_of(folder if base is None else model_folder(base)), _calibration_of(folder))


def origin_of(folder: Path) -> Origin:
    """Of a folder's own weights, or of those that it was quantized from."""
    told = _first_object(folder / QUANTIZATION_LOG).get("origin")
    if isinstance(told, dict):
        if told.get("kind") == "trained":
            return Origin("trained", _count(told.get("stages")), _count(told.get("noisy_stages")))
        return _imported(told)
    training = _first_object(folder / _TRAINING_RECORD)
    if "data_sha256" in training or isinstance(training.get("stages"), list):
        return _trained(training)
    return _imported(_first_object(folder / IMPORT_RECORD))


def carried_log(folder: Path) -> str:
    """The log of a folder with the same weights in another layout: what is still true; empty where nothing is known."""
    first = _first_object(folder / QUANTIZATION_LOG)
    kept = {name: first[name] for name in ("recipe", "calibration", "origin") if name in first}
    return json.dumps(kept) + "\n" if kept else ""


def _imported(record: dict[str, Any]) -> Origin:
    """As given, unless the record names a file and what was in it."""
    file, types = record.get("file"), record.get("tensor_types")
    if not isinstance(file, str) or not file or not isinstance(types, dict):
        return Origin("as given")
    counts = {_printable(str(name)): _count(number) for name, number in types.items()}
    return Origin("gguf", file=_printable(file), tensor_types=counts, kept=record.get("kept") is True)


def _trained(record: dict[str, Any]) -> Origin:
    stages = record.get("stages", [record])
    noisy = [isinstance(stage, dict) and bool(stage.get("rounding_noise")) for stage in stages]
    last = next((place for place, noise in enumerate(reversed(noisy)) if not noise), len(noisy))
    return Origin("trained", stages=len(stages), noisy_stages=last)


def _calibration_of(folder: Path) -> CalibrationData:
    if not Checkpoint(folder).formats:
        return CalibrationData("not quantized")
    log = _first_object(folder / QUANTIZATION_LOG)
    if "calibration" not in log:
        return CalibrationData("unknown")
    record = log["calibration"]
    if not isinstance(record, dict):
        return CalibrationData("no data")
    source = _printable(str(record.get("source", "")))
    default = bool(record.get("default", source == CALIBRATION_TEXT.name))  # logs of earlier versions say the name only
    sizes = _count(record.get("samples")), _count(record.get("seq_len"))
    return CalibrationData("text", source, default, *sizes, _mix(record.get("mix")))


def _mix(parts: object) -> dict[str, int]:
    """Samples by the names of their sources."""
    counts: Counter[str] = Counter()
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict):
            counts[_printable(str(part.get("source", "")))] += _count(part.get("samples"))
    return dict(counts)


def _printable(text: str) -> str:
    """A name from a file goes to terminals."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _first_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or in its first line; empty where there is none."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text.partition("\n")[0] if file.suffix == ".jsonl" else text)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
