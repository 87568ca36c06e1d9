"""Engines to measure: of a shape with random weights, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.run import SHORT_PROMPT, WARM_UP_TOKENS, Load, run_load, seconds_since_process_start
from quantkit.eval.engine.shapes import SHAPES, RandomWeights
from quantkit.eval.kernels.cases import FORMATS, UNQUANTIZED
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
    """An engine that has given its first token. `first` says whether it is the first one of this process."""
    stages = Stages()
    if format_name == CHECKPOINT:
        engine = start_engine(model, options, stages=stages)
        described = describe_formats(Path(model), engine)
    else:
        raw = SHAPES[model]
        config = read_model_config(raw)
        dtype = options.torch_dtype("bfloat16")
        weights = RandomWeights(config, format_name, dtype, options.torch_device)
        engine = build_engine(raw, config, weights.load, weights.nbytes(), dtype, options, stages=stages)
        described = format_name
    run_load(engine, Load(1, min(SHORT_PROMPT, max(1, engine.memory.max_context // 2)), WARM_UP_TOKENS))
    embedding = engine.runner.decoder.weights.embedding
    return engine, Started(
        model=model,
        format=described,
        dtype=str(embedding.dtype)[6:],
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
