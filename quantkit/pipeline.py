"""From a model and a recipe to a checkpoint: layer by layer, verified before it takes its final name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.arch import family_of
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.checkpoint_writer import DEFAULT_SHARD_BYTES, CheckpointWriter, check_output
from quantkit.errors import InputError, QuantkitError
from quantkit.formats import Format, dialect_of
from quantkit.formats.base import ANY_LENGTH
from quantkit.methods import method_named
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe, load_recipe
from quantkit.sources import model_folder

LM_HEAD = "lm_head"  # stays as it is: half the readers cannot load a quantized one


@dataclass(frozen=True)
class LayerReport:
    """What became of one linear layer."""

    module: str
    scheme: str
    weights: int
    bytes: int
    relative_error: float  # ||decoded - original|| / ||original||


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` did."""

    output: str
    recipe: str
    format: str
    source_bytes: int
    bytes: int
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
    overwrite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_layer: Progress = silent,
) -> QuantizeReport:
    """Quantizes a model (folder, hub name or `demo`) by a recipe (name, file or value) into a new folder."""
    check_output(Path(output).absolute(), overwrite)
    source = Checkpoint(model_folder(model))
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if source.formats:
        raise InputError(f"{source.folder} is quantized already; quantize the original model, or use convert")
    plan = recipe.plan(family_of(source.config), source.config, source.dtype)
    chosen = {module: fmt for module, fmt in plan.items() if fmt is not None}
    needed = _check_layers(source, chosen)
    with CheckpointWriter(output, overwrite=overwrite, shard_bytes=shard_bytes, expected_bytes=needed) as writer:
        layers, promised = _write_tensors(source, chosen, recipe.method, writer, on_layer)
        kept = [module for module, fmt in plan.items() if fmt is None]
        write_config(writer, source, chosen, [LM_HEAD, *kept])
        writer.finish(lambda folder: verify_written(folder, promised))
    source_bytes = sum(stored.nbytes for stored in source.tensors.values())
    name = next(iter(chosen.values())).name
    return QuantizeReport(str(output), recipe.name, name, source_bytes, writer.total_bytes, tuple(layers))


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


def _write_tensors(
    source: Checkpoint,
    chosen: Mapping[str, Format],
    method: str,
    writer: CheckpointWriter,
    on_layer: Progress,
) -> tuple[list[LayerReport], dict[str, float]]:
    """Streams every tensor through; returns the layers' reports and the fingerprints to verify the files against."""
    quantize_layer = method_named(method)
    layers: list[LayerReport] = []
    promised: dict[str, float] = {}
    for name in source.tensors:
        tensor = source.tensor(name)
        require_finite(name, tensor)
        module = name.removesuffix(".weight")
        if module not in chosen:
            writer.add(name, tensor)
            continue
        fmt = chosen[module]
        quantized = quantize_layer(tensor, fmt)
        parts = fmt.pack(quantized)
        for suffix, part in parts.items():
            writer.add(f"{module}.{suffix}", part)
        decoded = quantized.dequantize()
        promised[module] = fingerprint(decoded)
        size = sum(part.numel() * part.element_size() for part in parts.values())
        error = relative_error(decoded, tensor)
        layers.append(LayerReport(module, fmt.describe(), tensor.numel(), size, error))
        on_layer(module, len(chosen))
    return layers, promised


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
