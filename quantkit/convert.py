"""Between formats without loss: the same codes and scales in another layout, or a refusal with the reason."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import family_of
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.checkpoint_writer import CheckpointWriter, check_output
from quantkit.defaults import SHARD_BYTES
from quantkit.errors import CannotHold, InputError, QuantkitError, did_you_mean
from quantkit.extras import require
from quantkit.formats import FORMATS, Awq, Format, IntegerFormat, dialect_with, options_of
from quantkit.formats.base import check_choice
from quantkit.formats.kv_scheme import STRATEGIES, kv_strategy
from quantkit.passes.kv_range import check_kv_range, measure_kv_scales
from quantkit.pipeline.verification import fingerprint, verify_written
from quantkit.pipeline.writing import LM_HEAD, write_config
from quantkit.progress import Progress, silent
from quantkit.provenance import QUANTIZATION_LOG, carried_log
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

# What a user may ask for, and the format and options that it means.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"version": 1}),
    "gptq-v2": ("gptq", {"version": 2}),
    "awq": ("awq", {}),
    "compressed-tensors": ("ct-packed", {}),
    "w8a8": ("ct-int8", {}),
    "nf4-plain": ("nf4", {"double_quant": False}),
    "fp4-plain": ("fp4", {"double_quant": False}),
    "ct-mxfp4": ("ct-mxfp4", {}),
}
# What becomes a GGUF file, and the type of its matrices; None: that of the folder.
GGUF_TARGETS = {"gguf": None, "gguf-f32": "F32", "gguf-f16": "F16", "gguf-bf16": "BF16"}


@dataclass(frozen=True)
class ConvertReport:
    output: str
    source_format: str
    target_format: str
    layers: int
    bytes: int
    exact: bool = True  # whether every decoded weight is unchanged
    notes: tuple[str, ...] = ()  # what the reader of the result will do otherwise


def convert(
    checkpoint: str | Path,
    to: str,
    output: str | Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    kv_scales: str | None = None,
    calibration: Calibration | None = None,
    device: str = "cpu",
    on_layer: Progress = silent,
) -> ConvertReport:
    """Rewrites a quantized checkpoint in another format; every decoded weight stays bit for bit the same.

    With `kv_scales` (tensor or attn_head) scales of an FP8 cache are measured on `calibration`, with the model on
    `device`, and written beside the weights. To GGUF also a model that is not quantized can be converted: one file, for
    llama.cpp.
    """
    if kv_scales is not None:
        _check_kv_scales(kv_scales, to)
    if to in GGUF_TARGETS:
        return _to_gguf(checkpoint, output, GGUF_TARGETS[to], overwrite, on_layer)
    if to not in TARGETS:
        raise InputError(f"cannot convert to '{to}'; {did_you_mean(to, [*TARGETS, *GGUF_TARGETS])}")
    check_output(Path(output).absolute(), overwrite)
    source = Checkpoint(model_folder(checkpoint))
    if not source.formats:
        raise InputError(f"{source.folder} is not quantized, so there are no codes to convert; use quantize")
    scales = _KvScales.of(source, to, kv_scales, calibration or Calibration(), device)
    symmetric = _symmetric_formats(source)
    targets: dict[str, Format] = {}
    promised: dict[str, int] = {}
    with CheckpointWriter(output, overwrite=overwrite, shard_bytes=shard_bytes) as writer:
        for name in source.plain_names():
            tensor = source.tensor(name)
            require_finite(name, tensor)
            writer.add(name, tensor)
        for module, fmt in source.formats.items():
            old = symmetric.get(fmt, fmt)
            targets[module], promised[module] = _convert_layer(source, module, old, to, writer)
            on_layer(module, len(source.formats))
        for name, tensor in scales.tensors.items():
            writer.add(name, tensor)
        write_config(writer, source, targets, _kept(source), scales.strategy)
        if log := carried_log(source.folder):
            writer.add_text(QUANTIZATION_LOG, log)
        writer.finish(lambda folder: verify_written(folder, promised))
    names = [", ".join(sorted({fmt.name for fmt in side.values()})) for side in (source.formats, targets)]
    return ConvertReport(str(output), names[0], names[1], len(targets), writer.total_bytes, notes=scales.notes)


def _check_kv_scales(kv_scales: str, to: str) -> None:
    check_choice("kv_scales", kv_scales, STRATEGIES)
    if to in GGUF_TARGETS or (to in TARGETS and not dialect_with(TARGETS[to][0]).holds_kv_scales):
        raise InputError(
            f"kv_scales are kept by compressed-tensors checkpoints, not by {to}; use --to compressed-tensors, w8a8 or "
            "ct-mxfp4, or leave --kv-scales out"
        )


@dataclass(frozen=True)
class _KvScales:
    """Scales of an FP8 cache that the result has: measured now, or the source's."""

    strategy: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, source: Checkpoint, to: str, asked: str | None, calibration: Calibration, device: str
    ) -> _KvScales:  # fmt: skip
        found = kv_strategy(source.config)
        if asked is not None:
            family = family_of(source.config)
            check_kv_range(family, source.config)
            context = int(source.config.get("max_position_embeddings") or calibration.seq_len)
            tokens = calibration.tokens(load_tokenizer(source.folder), context)
            with tempfile.TemporaryDirectory() as scratch:
                return cls(asked, measure_kv_scales(source, family, tokens, asked, device, Path(scratch)))
        if found is None:
            return cls()
        if not dialect_with(TARGETS[to][0]).holds_kv_scales:
            return cls(notes=(f"scales of an FP8 cache are left out, since {to} checkpoints have none",))
        return cls(found, {name: source.tensor(name) for name in source.cache_names()})


def _to_gguf(
    checkpoint: str | Path, output: str | Path, kind: str | None, overwrite: bool, on_tensor: Progress
) -> ConvertReport:
    require("quantkit convert --to gguf", "gguf")
    from quantkit.gguf_export import export_gguf

    report = export_gguf(checkpoint, output, kind=kind, overwrite=overwrite, on_tensor=on_tensor)
    types = ", ".join(f"{count} x {name}" for name, count in report.tensor_types.items())
    facts = (report.source_format, types, report.matrices, report.bytes, report.exact)
    return ConvertReport(report.output, *facts, report.notes)


def _convert_layer(
    source: Checkpoint, module: str, old: Format, to: str, writer: CheckpointWriter
) -> tuple[Format, int]:
    quantized = source.quantized(module)
    try:
        new = target_format(old, to)
        new.check(quantized.shape)
        parts = new.pack(quantized)
    except InputError as error:
        raise CannotHold(f"{module} cannot become {to}: {error}") from error
    decoded = quantized.dequantize()
    if not torch.equal(new.decode(parts), decoded):
        raise QuantkitError(f"{module} would change its values as {to}; this is a bug, please report it")
    for suffix, part in parts.items():
        writer.add(f"{module}.{suffix}", part)
    return new, fingerprint(decoded)


def _symmetric_formats(source: Checkpoint) -> dict[Format, Format]:
    """AWQ formats whose zero points are the middle in all their layers, and what they are without zero points.

    AWQ has no other way to store symmetric weights, and vLLM takes GPTQ only where it says that it is symmetric.
    """
    found: dict[Format, Format] = {
        fmt: replace(fmt, sym=True) for fmt in source.formats.values() if isinstance(fmt, Awq)
    }
    for module, fmt in source.formats.items():
        if isinstance(fmt, Awq) and fmt in found:
            with source.naming(module):
                if not fmt.stores_symmetric(source.tensor(f"{module}.qzeros")):
                    del found[fmt]  # where zero points are used, the first layer tells
    return found


def target_format(old: Format, to: str) -> Format:
    """The target with every option taken over from the source that both have."""
    name, options = TARGETS[to]
    if issubclass(FORMATS[name], IntegerFormat) != isinstance(old, IntegerFormat):
        raise CannotHold(f"{old.name} and {name} do not store the same kind of codes (integer grid or value table)")
    taken = {option: getattr(old, option) for option in options_of(name) if hasattr(old, option)}
    return FORMATS[name](**(taken | options))


def _kept(source: Checkpoint) -> list[str]:
    linears = family_of(source.config).linears(source.config)
    return [LM_HEAD, *(module for module in linears if module not in source.formats)]
