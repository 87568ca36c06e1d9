"""Engines to measure: of a shape with random weights, or of a checkpoint.

Where a model may be either, a shape is written `shape:NAME:FORMAT`, such as shape:llama-3.2-1b:w4.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.engine.outliers import OutlierProfile
from quantkit.eval.engine.results import Started
from quantkit.eval.engine.run import SHORT_PROMPT, WARM_UP_TOKENS, Load, run_load, seconds_since_process_start
from quantkit.eval.engine.shape_formats import check_format_name, shape_format
from quantkit.eval.engine.shapes import SHAPES, RandomWeights
from quantkit.eval.kernels.cases import UNQUANTIZED
from quantkit.eval.shapes import QUANTIZED_EXPERTS
from quantkit.formats import Format
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.build import check_arithmetic
from quantkit.runtime.drafters.draft_model import DraftModel
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.config import ModelConfig, read_model_config
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.startup import Stages, build_engine, start_engine
from quantkit.sources import model_folder

CHECKPOINT = "checkpoint"  # instead of a format's name, for a folder that has its own
SHAPE_PREFIX = "shape:"


def parse_shape(text: str) -> tuple[str, str] | None:
    """`shape:NAME:FORMAT` as name and format (unquantized without one); None for a folder or a hub name."""
    if not text.startswith(SHAPE_PREFIX):
        return None
    name, _, format_name = text.removeprefix(SHAPE_PREFIX).partition(":")
    if name not in SHAPES:
        raise InputError(f"unknown shape '{name}'; {did_you_mean(name, SHAPES)}")
    return name, formats_of(name, [format_name or UNQUANTIZED])[0]


def formats_of(model: str, asked: list[str]) -> list[str]:
    """The formats to measure for a shape or a folder."""
    if model not in SHAPES:
        if asked:
            raise InputError(f"'{model}' is a checkpoint and has its format; --format is for {', '.join(SHAPES)}")
        return [CHECKPOINT]
    for name in asked:
        check_format_name(model, name)
    usual = ["mxfp4"] if model in QUANTIZED_EXPERTS else ["w4", "nf4", "llm-int8"]
    return asked or [*usual, UNQUANTIZED]


def start(
    model: str,
    format_name: str,
    options: EngineOptions,
    *,
    first: bool,
    zeros: bool = False,
    outliers: OutlierProfile | None = None,
) -> tuple[Engine, Started]:
    """An engine for a checkpoint, or for a shape in a format of `formats_of`, with weights at random or of zeros."""
    if format_name == CHECKPOINT:
        return start_checkpoint(model, options, first=first)
    fmt, described = _format(model, format_name, options), f"{format_name}, zeros" if zeros else format_name
    return start_shape(model, fmt, options, first=first, described=described, zeros=zeros, outliers=outliers)


def start_checkpoint(model: str, options: EngineOptions, *, first: bool) -> tuple[Engine, Started]:
    """An engine that has given its first token. `first` says whether it is the first one of this process."""
    check_draft(model, options)
    stages = Stages()
    engine = start_engine(model, options, stages=stages)
    with stages.stage("tokenizer"):  # not the engine's, but a user waits for it too
        load_tokenizer(model_folder(model))
    return engine, _started(engine, model, describe_formats(Path(model), engine), stages, first)


def start_shape(
    shape: str,
    fmt: Format | None,
    options: EngineOptions,
    *,
    first: bool,
    described: str | None = None,
    zeros: bool = False,
    outliers: OutlierProfile | None = None,
) -> tuple[Engine, Started]:
    """The same with random weights; every linear, or every expert, is in one format, or as it is."""
    stages, raw = Stages(), SHAPES[shape]
    config = read_model_config(raw)
    dtype = options.torch_dtype("bfloat16")
    alone = shape in QUANTIZED_EXPERTS
    check_arithmetic(options.arithmetic, [] if fmt is None or alone else [fmt])
    weights = RandomWeights(
        *(config, fmt, dtype, options.torch_device, options.head_bits),
        zeros=zeros,
        experts_alone=alone,
        outliers=outliers,
        arithmetic=options.arithmetic,
    )
    draft = _shape_draft(config, dtype, options)
    engine = build_engine(raw, config, weights.load, weights.nbytes(), dtype, options, stages=stages, draft=draft)
    name = described or (fmt.describe() if fmt else str(dtype)[6:])
    started = _started(engine, shape, name, stages, first)
    return engine, replace(started, outliers=None if outliers is None else outliers.name)


def _started(engine: Engine, model: str, described: str, stages: Stages, first: bool) -> Started:
    run_load(engine, Load(1, min(SHORT_PROMPT, max(1, engine.memory.max_context // 2)), WARM_UP_TOKENS))
    return Started(
        model=model,
        format=described + engine.options.as_told,
        dtype=str(engine.runner.decoder.weights.dtype)[6:],
        kv_dtype=engine.runner.cache.kind.label,
        stages=stages.seconds,
        process_to_first_token=seconds_since_process_start() if first else None,
        weights=engine.memory.weights,
        kv_tokens=engine.memory.kv_tokens,
        speculative=engine.options.speculative,
        micro_batches=engine.options.in_stages,
    )


def check_draft(model: str, options: EngineOptions) -> None:
    """Refuses what can be seen before anything is loaded. `model` is as `parse_shape` takes it."""
    shape, draft = parse_shape(model), _draft_path(options)
    if shape is not None:
        _shape_draft(read_model_config(SHAPES[shape[0]]), options.torch_dtype("bfloat16"), options)
    elif draft is not None and draft.startswith(SHAPE_PREFIX):
        raise InputError(f"the draft is '{draft}', but a checkpoint needs one that knows its tokens; give a folder")


def _draft_path(options: EngineOptions) -> str | None:
    asked = options.speculation
    return asked.what if asked is not None and asked.kind == "draft" else None


def _shape_draft(target: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> DraftModel | None:
    """For a shape: a draft with random weights too."""
    path = _draft_path(options)
    if path is None:
        return None
    shape = parse_shape(path)
    if shape is None:
        raise InputError(f"a shape has random weights, and so must its draft '{path}'; use draft=shape:NAME:FORMAT")
    raw, config = SHAPES[shape[0]], read_model_config(SHAPES[shape[0]])
    if config.vocab != target.vocab:
        raise InputError(
            f"the draft {path} has {config.vocab} tokens, the model {target.vocab}; a draft needs the same tokens"
        )
    weights = RandomWeights(config, _format(*shape, options), dtype, options.torch_device)
    return DraftModel(raw, config, lambda target, kv_dtype: weights.load(), weights.nbytes())


def _format(shape: str, name: str, options: EngineOptions) -> Format | None:
    return shape_format(shape, name, str(options.torch_dtype("bfloat16"))[6:])


def describe_formats(folder: Path, engine: Engine) -> str:
    from quantkit.checkpoint import Checkpoint

    found = sorted({fmt.describe() for fmt in Checkpoint(model_folder(folder)).formats.values()})
    described = ", ".join(found) or str(engine.runner.decoder.weights.dtype)[6:]
    options = engine.options
    if options.tensor_parallel * options.pipeline_parallel == 1:
        return described
    return f"{described}, tensor {options.tensor_parallel} x pipeline {options.pipeline_parallel}"


def peak_memory(device: torch.device) -> int:
    """Most bytes that torch held on the device; of a CPU, nobody counts."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
