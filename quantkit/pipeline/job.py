"""A quantization run before it begins: everything it needs, checked."""

from __future__ import annotations

import hashlib
import json
import math
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
from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.formats.base import ANY_LENGTH
from quantkit.formats.llm_int8 import LlmInt8
from quantkit.methods import MethodOptions
from quantkit.methods.steps import check_format
from quantkit.recipe import Recipe, load_recipe
from quantkit.reference import check_device, load_tokenizer
from quantkit.sources import model_folder

QUALITY_WINDOW = 1024  # tokens
_PACKAGES = ("quantkit", "torch", "transformers")


@dataclass(frozen=True)
class Job:
    """One run."""

    model: str  # as it was named
    source: Checkpoint
    family: Family
    recipe: Recipe
    options: MethodOptions
    plan: Mapping[str, Format | None]
    tokens: Tensor | None  # calibration [samples, length]; None where the method looks at no data
    calibration: dict[str, Any] | None  # the record of these tokens
    quality: Tensor | None  # held-out windows [windows, window]; None where nothing is measured
    device: str
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
        groups = self.family.linear_groups(self.source.config)
        each = len(self.family.groups)
        return [
            [module for group in groups[start : start + each] for module in group]
            for start in range(0, len(groups), each)
        ]

    def disk_bytes(self) -> int:
        """What the run needs at its largest: the output, and until it is complete the journal beside it."""
        output = check_layers(self.source, self.chosen)
        plain = {name for name in self.source.tensors if name.removesuffix(".weight") not in self.chosen}
        return 2 * output - sum(self.source.tensors[name].nbytes for name in plain)

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
            "versions": {name: _version(name) for name in _PACKAGES},
        }


def prepare(
    model: str | Path,
    recipe: str | Recipe,
    calibration: Calibration | None,
    device: str,
    shard_bytes: int,
    quality_windows: int,
) -> Job:
    """Checks model, recipe, device and data."""
    check_device(device)
    source = Checkpoint(model_folder(model))
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if source.formats:
        raise InputError(f"{source.folder} is quantized already; quantize the original model, or use convert")
    family = family_of(source.config)
    plan = recipe.plan(family, source.config, source.dtype)
    options = recipe.method.build()
    for fmt in {fmt for fmt in plan.values() if fmt is not None}:
        check_format(options, fmt)
    check_layers(source, {module: fmt for module, fmt in plan.items() if fmt is not None})
    _check_outside(source, family, device)
    calibration = calibration or Calibration.from_recipe(recipe.calibration)
    tokens = record = None
    needed = looks_at_data(options, plan) or recipe.target_bits is not None
    if needed or (calibration.samples > 0 and _lists_outliers(source, plan)):
        context = int(source.config.get("max_position_embeddings") or calibration.seq_len)
        tokens = calibration.tokens(load_tokenizer(source.folder), context)
        record = calibration.record(tokens)
    quality = _quality_windows(source, quality_windows)
    return Job(str(model), source, family, recipe, options, plan, tokens, record, quality, device, shard_bytes)


def looks_at_data(options: MethodOptions, plan: Mapping[str, Format | None]) -> bool:
    """Whether a run cannot do without calibration."""
    return options.calibrated or any(fmt is not None and fmt.needs_input_scale for fmt in plan.values())


def _lists_outliers(source: Checkpoint, plan: Mapping[str, Format | None]) -> bool:
    """LLM.int8 rounds without data; where there is a tokenizer, calibration finds its outlier columns for the log."""
    return _has_tokenizer(source) and any(isinstance(fmt, LlmInt8) for fmt in plan.values())


def _has_tokenizer(source: Checkpoint) -> bool:
    return any(source.folder.glob("tokenizer*"))


def _check_outside(source: Checkpoint, family: Family, device: str) -> None:
    """Refuses NaN and Inf in embeddings and output layer now; the blocks are checked as they are loaded."""
    for name in source.tensors:
        if not name.startswith(f"{family.blocks}."):
            require_finite(name, source.tensor(name).to(device))


def check_layers(source: Checkpoint, chosen: Mapping[str, Format]) -> int:
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


def _quality_windows(source: Checkpoint, count: int) -> Tensor | None:
    """The first windows of the held-out text; None where the model brings no tokenizer to read it with."""
    if count < 0:
        raise InputError(f"{count} windows to measure quality on; choose 0 (none) or more")
    if count == 0 or not _has_tokenizer(source):
        return None
    window = min(QUALITY_WINDOW, int(source.config.get("max_position_embeddings") or QUALITY_WINDOW))
    return token_windows(load_tokenizer(source.folder), HELDOUT_TEXT, window, count)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
