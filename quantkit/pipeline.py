"""From a model and a recipe to a checkpoint: layer by layer, verified before it takes its final name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.arch import Family, family_of
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.checkpoint_writer import DEFAULT_SHARD_BYTES, CheckpointWriter, check_output
from quantkit.errors import InputError, QuantkitError
from quantkit.formats import Format, dialect_of
from quantkit.formats.base import ANY_LENGTH
from quantkit.methods import CALIBRATED
from quantkit.passes import QuantizedLayer, calibrated_gptq, rounding
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe, load_recipe
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

LM_HEAD = "lm_head"  # stays as it is: half the readers cannot load a quantized one


@dataclass(frozen=True)
class LayerReport:
    """What became of one linear layer."""

    module: str
    scheme: str
    weights: int
    bytes: int
    relative_error: float  # ||decoded - original|| / ||original||; says little about quality
    log: dict[str, float]  # what the method measured, such as its loss


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` did."""

    output: str
    recipe: str
    format: str
    source_bytes: int
    bytes: int
    calibration: dict[str, Any] | None  # the data that the method saw
    layers: tuple[LayerReport, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized layers, scales and all."""
        return 8 * sum(layer.bytes for layer in self.layers) / sum(layer.weights for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bits_per_weight": self.bits_per_weight}


def quantize(
    model: str | Path,
    recipe: str | Recipe,
    output: str | Path,
    *,
    calibration: Calibration | None = None,
    overwrite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_layer: Progress = silent,
) -> QuantizeReport:
    """Quantizes a model (folder, hub name or `demo`) by a recipe (name, file or value) into a new folder.

    Methods that need data take it from `calibration`, by default from the text that ships with quantkit.
    """
    check_output(Path(output).absolute(), overwrite)
    source = Checkpoint(model_folder(model))
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if source.formats:
        raise InputError(f"{source.folder} is quantized already; quantize the original model, or use convert")
    family = family_of(source.config)
    plan = recipe.plan(family, source.config, source.dtype)
    chosen = {module: fmt for module, fmt in plan.items() if fmt is not None}
    needed = _check_layers(source, chosen)
    passing, record = _method_pass(source, family, chosen, recipe.method, calibration or Calibration())
    with CheckpointWriter(output, overwrite=overwrite, shard_bytes=shard_bytes, expected_bytes=needed) as writer:
        _copy_plain(source, chosen, writer)
        layers, promised = _write_layers(passing, chosen, writer, on_layer)
        kept = [module for module, fmt in plan.items() if fmt is None]
        write_config(writer, source, chosen, [LM_HEAD, *kept])
        writer.add_text("quantization_log.jsonl", _log(recipe, record, layers))
        writer.finish(lambda folder: verify_written(folder, promised))
    source_bytes = sum(stored.nbytes for stored in source.tensors.values())
    name = next(iter(chosen.values())).name
    return QuantizeReport(str(output), recipe.name, name, source_bytes, writer.total_bytes, record, tuple(layers))


def _method_pass(
    source: Checkpoint, family: Family, chosen: Mapping[str, Format], method: str, calibration: Calibration
) -> tuple[Iterator[QuantizedLayer], dict[str, Any] | None]:
    """The pass of a method over the layers, and the record of the data it will see."""
    if method not in CALIBRATED:
        return rounding(source, chosen), None
    tokens = calibration.tokens(
        load_tokenizer(source.folder), int(source.config.get("max_position_embeddings") or calibration.seq_len)
    )
    return calibrated_gptq(source, family, chosen, tokens), calibration.record(tokens)


def _check_layers(source: Checkpoint, chosen: Mapping[str, Format]) -> int:
    """Refuses layers that the plan cannot store, before anything is written; returns the bytes to expect."""
    quantized_bytes = 0
    for module, fmt in chosen.items():
        stored = source.tensors.get(f"{module}.weight")
        if stored is None:
            raise InputError(f"{source.folder} has no tensor {module}.weight; the checkpoint is incomplete")
        shape = (stored.info.shape[0], stored.info.shape[1])
        try:
            fmt.check(shape)
        except InputError as error:
            raise InputError(f"{module} [{shape[0]} x {shape[1]}] as {fmt.name} {fmt.describe()}: {error}") from error
        specs = fmt.parts(shape).values()
        quantized_bytes += sum(math.prod(s.shape) * s.dtype.itemsize for s in specs if ANY_LENGTH not in s.shape)
    replaced = {f"{module}.weight" for module in chosen}
    return quantized_bytes + sum(stored.nbytes for name, stored in source.tensors.items() if name not in replaced)


def _copy_plain(source: Checkpoint, chosen: Mapping[str, Format], writer: CheckpointWriter) -> None:
    """Everything that stays as it is."""
    for name in source.tensors:
        if name.removesuffix(".weight") not in chosen:
            tensor = source.tensor(name)
            require_finite(name, tensor)
            writer.add(name, tensor)


def _write_layers(
    passing: Iterable[QuantizedLayer], chosen: Mapping[str, Format], writer: CheckpointWriter, on_layer: Progress
) -> tuple[list[LayerReport], dict[str, float]]:
    """Packs layer after layer; returns their reports and the fingerprints to verify the files against."""
    layers: list[LayerReport] = []
    promised: dict[str, float] = {}
    for layer in passing:
        fmt = chosen[layer.module]
        parts = fmt.pack(layer.quantized)
        for suffix, part in parts.items():
            writer.add(f"{layer.module}.{suffix}", part)
        decoded = layer.quantized.dequantize()
        promised[layer.module] = fingerprint(decoded)
        size = sum(part.numel() * part.element_size() for part in parts.values())
        error = relative_error(decoded, layer.weight)
        scheme = fmt.describe()
        layers.append(LayerReport(layer.module, scheme, layer.weight.numel(), size, error, dict(layer.log)))
        on_layer(layer.module, len(chosen))
    return layers, promised


def _log(recipe: Recipe, calibration: dict[str, Any] | None, layers: list[LayerReport]) -> str:
    """One JSON object a line: what was asked, then what became of each layer."""
    lines = [{"recipe": recipe.to_dict(), "calibration": calibration}, *(asdict(layer) for layer in layers)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_config(writer: CheckpointWriter, source: Checkpoint, modules: Mapping[str, Format], kept: list[str]) -> None:
    """config.json with its quantization_config, what older readers look for beside it, and the source's small files."""
    dialect = dialect_of(modules)
    config = dialect.write(modules, kept)
    writer.add_json("config.json", source.config | {"quantization_config": config})
    for file in source.side_files():
        writer.add_file(file)
    for name, value in dialect.side_files(config).items():
        writer.add_json(name, value)


def relative_error(decoded: Tensor, original: Tensor) -> float:
    original = original.float()
    return float((decoded - original).norm() / original.norm().clamp(min=1e-30))


def fingerprint(weight: Tensor) -> float:
    """A number that any wrong, missing or misplaced value changes."""
    flat = weight.flatten().double()
    position = 1 + (flat.new_ones(flat.shape).cumsum(0) % 8191) / 8191
    return float((flat * position).sum())


def verify_written(folder: Path, promised: Mapping[str, float]) -> None:
    """Reads every quantized layer back as any other reader would."""
    written = Checkpoint(folder)
    for module, value in promised.items():
        if module not in written.formats:
            raise QuantkitError(f"{module} cannot be found again in the written checkpoint")
        if fingerprint(written.weight(module)) != value:
            raise QuantkitError(f"{module} read back from disk differs from what was written; disk or memory is faulty")
