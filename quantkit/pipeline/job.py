"""A quantization run before it begins: everything it needs, checked. Both the run and its dry run start from here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import Family, family_of
from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import Calibration, token_windows
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.checkpoint_writer import check_output, check_space
from quantkit.defaults import DEVICE, QUALITY_WINDOWS, SHARD_BYTES, WINDOW
from quantkit.devices import resolve_device
from quantkit.errors import InputError
from quantkit.expert_check import check_experts
from quantkit.extras import require
from quantkit.formats import Format, Gguf, Shape
from quantkit.methods import Method, needs_data, package_of
from quantkit.passes.calibrated import check_folds
from quantkit.passes.kv_range import check_kv_range
from quantkit.pipeline.gguf_types import by_matrix, outside_formats
from quantkit.pipeline.target_bits import check_target
from quantkit.recipe import Recipe, load_recipe
from quantkit.reference import load_tokenizer
from quantkit.skeleton import check_blocks
from quantkit.sources import model_folder
from quantkit.token_windows import StartToken, start_token
from quantkit.touch_up import check_touch_up

_PACKAGES = ("quantkit", "torch", "transformers")


@dataclass(frozen=True)
class Job:
    """One run."""

    model: str  # as it was named
    source: Checkpoint
    family: Family
    recipe: Recipe
    method: Method
    plan: Mapping[str, Format | None]
    shapes: Mapping[str, Shape]  # of every linear in the plan
    data: Calibration  # where calibration tokens come from, if they are needed
    tokens: Tensor | None  # calibration [samples, length]; None where the method looks at no data
    calibration: dict[str, Any] | None  # the record of these tokens
    start: StartToken | None  # that all windows begin with, of calibration and of held-out text
    quality: Tensor | None  # held-out windows [windows, window]; None where nothing is measured
    device: str
    output: str | Path
    overwrite: bool
    restart: bool  # whether the journal of an earlier run is thrown away
    shard_bytes: int

    @property
    def chosen(self) -> dict[str, Format]:
        """The layers to quantize."""
        return {module: fmt for module, fmt in self.plan.items() if fmt is not None}

    @property
    def kept(self) -> list[str]:
        """Linears of the blocks that stay as they are."""
        return [module for module, fmt in self.plan.items() if fmt is None]

    @property
    def blocks(self) -> list[list[str]]:
        """The linears of every block."""
        by_layer = self.family.linears_by_stage(self.source.config)
        return [[module for modules in stages for module in modules] for stages in by_layer]

    @property
    def mix(self) -> Gguf | None:
        """The mix of types of a run that writes a GGUF file."""
        own = self.recipe.formats(self.source.dtype)[-1]
        return own if isinstance(own, Gguf) else None

    @property
    def outside(self) -> dict[str, Gguf]:
        """Embeddings and output layer, where they are rounded too."""
        return {} if self.mix is None else outside_formats(self.mix, self.family, self.source)

    @property
    def plain_bytes(self) -> int:
        """Of all tensors that no method rounds."""
        outside = self.outside
        replaced = {f"{module}.weight" for module in (*self.chosen, *outside)}
        plain = sum(stored.nbytes for name, stored in self.source.tensors.items() if name not in replaced)
        shapes = {module: self.source.tensors[f"{module}.weight"].info.shape for module in outside}
        return plain + sum(fmt.nbytes((shapes[module][0], shapes[module][1])) for module, fmt in outside.items())

    def quantized_bytes(self, chosen: Mapping[str, Format]) -> int:
        """Of the layers to quantize, in these formats."""
        return sum(fmt.nbytes(self.shapes[module]) for module, fmt in chosen.items())

    def disk_bytes(self) -> int:
        """What the run needs at its largest: the output, and until it is complete the journal beside it."""
        return self.plain_bytes + 2 * self.quantized_bytes(self.chosen)

    def arguments(self) -> dict[str, Any]:
        """Everything that decides the result, for the journal."""
        files = sorted({stored.file for stored in self.source.tensors.values()})
        return {
            "model": self.model,
            "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
            "config": hashlib.sha256(json.dumps(self.source.config, sort_keys=True).encode()).hexdigest(),
            "recipe": self.recipe.to_dict(),
            "calibration": self.calibration,
            "quality_windows": 0 if self.quality is None else len(self.quality),
            "device": self.device,
            "threads": torch.get_num_threads(),  # sums are added up in another order with more of them
            "shard_bytes": self.shard_bytes,
            "versions": {name: _version(name) for name in (*_PACKAGES, package_of(self.method.name))},
        }


def prepare(
    model: str | Path,
    recipe: str | Recipe,
    output: str | Path,
    *,
    calibration: Calibration | None = None,
    device: str = DEVICE,
    overwrite: bool = False,
    restart: bool = False,
    shard_bytes: int = SHARD_BYTES,
    quality_windows: int = QUALITY_WINDOWS,
) -> Job:
    """Refuses what cannot be done: checks output, device, model, recipe, data and space on the disk; writes nothing."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if recipe.writes_gguf:
        require(f"the recipe {recipe.name}", "gguf")
        from quantkit.gguf_export import check_file, exported

        check_file(Path(output).absolute(), overwrite)
    else:
        check_output(Path(output).absolute(), overwrite)
    device = resolve_device(device)
    source = Checkpoint(model_folder(model))
    if source.formats:
        raise InputError(f"{source.origin} is quantized already; quantize the original model, or use convert")
    family, method = family_of(source.config), recipe.method.build()
    check_experts(source)
    plan = recipe.plan(family, source.config, source.dtype)
    if recipe.writes_gguf:
        exported(source, model)
        plan = by_matrix(plan, family, source)
    shapes = _check_plan(source, family, recipe, method, plan)
    check_blocks(source, family)
    _check_outside(source, family, device)
    data = calibration or Calibration.from_recipe(recipe.calibration)
    tokens = _tokens(source, data, recipe, method, plan)
    start = start_token(load_tokenizer(source.folder)) if _has_tokenizer(source) else None
    record = None if tokens is None else data.record(tokens, start)
    quality = _quality_windows(source, quality_windows)
    settings = (device, output, overwrite, restart, shard_bytes)
    job = Job(str(model), source, family, recipe, method, plan, shapes, data, tokens, record, start, quality, *settings)
    check_space(Path(output).absolute(), job.disk_bytes())
    return job


def _check_plan(
    source: Checkpoint, family: Family, recipe: Recipe, method: Method, plan: Mapping[str, Format | None]
) -> dict[str, Shape]:
    """Refuses formats that do not suit the method, layers that do not suit them, and bits that cannot be met."""
    for fmt in dict.fromkeys(fmt for fmt in plan.values() if fmt is not None):
        method.check(fmt)
        if recipe.touch_up:
            check_touch_up(fmt)
    check_folds(method, family, source.config)
    if recipe.kv_scales is not None:
        check_kv_range(family, source.config)
    shapes = _layer_shapes(source, plan)
    if recipe.target_bits is not None:
        check_target(recipe.target_bits, family.linear_groups(source.config), plan, shapes)
    return shapes


def _layer_shapes(source: Checkpoint, plan: Mapping[str, Format | None]) -> dict[str, Shape]:
    """(out, in) of every linear; refuses layers that are missing or that their format cannot store."""
    shapes = {}
    for module, fmt in plan.items():
        stored = source.tensors.get(f"{module}.weight")
        if stored is None:
            raise InputError(f"{source.folder} has no tensor {module}.weight; the checkpoint is incomplete")
        out, inputs = stored.info.shape
        shapes[module] = (out, inputs)
        if fmt is not None:
            fmt.check_layer(module, shapes[module])
    return shapes


def _tokens(
    source: Checkpoint, data: Calibration, recipe: Recipe, method: Method, plan: Mapping[str, Format | None]
) -> Tensor | None:
    """Calibration tokens, where they are needed, or where they show outlier columns for the log."""
    needed = recipe.looks_on or needs_data(method, plan.values(), recipe.target_bits)
    if not needed and not (data.samples > 0 and _lists_outliers(source, plan)):
        return None
    context = int(source.config.get("max_position_embeddings") or data.seq_len)
    return data.tokens(load_tokenizer(source.folder), context)


def _lists_outliers(source: Checkpoint, plan: Mapping[str, Format | None]) -> bool:
    """LLM.int8 rounds without data; where there is a tokenizer, calibration finds its outlier columns for the log."""
    rounding = (fmt.input_rounding for fmt in plan.values() if fmt is not None)
    return _has_tokenizer(source) and any(one is not None and one.outlier_threshold is not None for one in rounding)


def _has_tokenizer(source: Checkpoint) -> bool:
    return any(source.folder.glob("tokenizer*"))


def _check_outside(source: Checkpoint, family: Family, device: str) -> None:
    """Refuses NaN and Inf in embeddings and output layer now; the blocks are checked as they are loaded."""
    for name in source.tensors:
        if not name.startswith(f"{family.blocks}."):
            require_finite(name, source.tensor(name).to(device))


def _quality_windows(source: Checkpoint, count: int) -> Tensor | None:
    """The first windows of the held-out text; None where the model brings no tokenizer to read it with."""
    if count < 0:
        raise InputError(f"{count} windows to measure quality on; choose 0 (none) or more")
    if count == 0 or not _has_tokenizer(source):
        return None
    window = min(WINDOW, int(source.config.get("max_position_embeddings") or WINDOW))
    return token_windows(load_tokenizer(source.folder), HELDOUT_TEXT, window, count)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
