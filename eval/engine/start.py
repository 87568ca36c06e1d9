"""Engines to measure: of a shape with random weights, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.run import SHORT_PROMPT, WARM_UP_TOKENS, Load, run_load, seconds_since_process_start
from quantkit.eval.engine.shapes import SHAPES, RandomWeights
from quantkit.eval.kernels.cases import FORMATS, UNQUANTIZED
from quantkit.formats import Format
from quantkit.runtime.engine import Engine
from quantkit.runtime.model_config import read_model_config
from quantkit.runtime.options import EngineOptions
from quantkit.runtime.startup import Stages, build_engine, start_engine

CHECKPOINT = "checkpoint"  # instead of a format's name, for a folder that has its own


def formats_of(model: str, asked: list[str]) -> list[str]:
    """The formats to measure for a shape or a folder."""
    if model not in SHAPES:
        if asked:
            raise InputError(f"'{model}' is a checkpoint and has its format; --format is for {', '.join(SHAPES)}")
        return [CHECKPOINT]
    for name in asked:
        if name not in FORMATS and name != UNQUANTIZED:
            raise InputError(f"unknown format '{name}'; {did_you_mean(name, (*FORMATS, UNQUANTIZED))}")
    return asked or ["w4", "nf4", "llm-int8", UNQUANTIZED]


def start(model: str, format_name: str, options: EngineOptions, *, first: bool) -> tuple[Engine, Started]:
    """An engine for a checkpoint, or for a shape in a format of `formats_of`."""
    if format_name == CHECKPOINT:
        return start_checkpoint(model, options, first=first)
    dtype = str(options.torch_dtype("bfloat16"))[6:]
    fmt = None if format_name == UNQUANTIZED else FORMATS[format_name](dtype)
    return start_shape(model, fmt, options, first=first, described=format_name)


def start_checkpoint(model: str, options: EngineOptions, *, first: bool) -> tuple[Engine, Started]:
    """An engine that has given its first token. `first` says whether it is the first one of this process."""
    stages = Stages()
    engine = start_engine(model, options, stages=stages)
    return engine, _started(engine, model, describe_formats(Path(model), engine), stages, first)


def start_shape(
    shape: str, fmt: Format | None, options: EngineOptions, *, first: bool, described: str | None = None
) -> tuple[Engine, Started]:
    """The same with random weights; every linear is in one format, or as it is."""
    stages, raw = Stages(), SHAPES[shape]
    config = read_model_config(raw)
    dtype = options.torch_dtype("bfloat16")
    weights = RandomWeights(config, fmt, dtype, options.torch_device)
    engine = build_engine(raw, config, weights.load, weights.nbytes(), dtype, options, stages=stages)
    name = described or (fmt.describe() if fmt else str(dtype)[6:])
    return engine, _started(engine, shape, name, stages, first)


def _started(engine: Engine, model: str, described: str, stages: Stages, first: bool) -> Started:
    run_load(engine, Load(1, min(SHORT_PROMPT, max(1, engine.memory.max_context // 2)), WARM_UP_TOKENS))
    return Started(
        model=model,
        format=described,
        dtype=str(engine.runner.decoder.weights.embedding.dtype)[6:],
        kv_dtype=str(engine.runner.cache.pages.dtype)[6:],
        stages=stages.seconds,
        process_to_first_token=seconds_since_process_start() if first else None,
        weights=engine.memory.weights,
        kv_tokens=engine.memory.kv_tokens,
    )


def describe_formats(folder: Path, engine: Engine) -> str:
    from quantkit.checkpoint import Checkpoint
    from quantkit.sources import model_folder

    found = sorted({fmt.describe() for fmt in Checkpoint(model_folder(folder)).formats.values()})
    return ", ".join(found) or str(engine.runner.decoder.weights.embedding.dtype)[6:]


def peak_memory(device: torch.device) -> int:
    """Most bytes that torch held on the device; of a CPU, nobody counts."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
