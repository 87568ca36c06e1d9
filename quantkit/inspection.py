"""What is inside a checkpoint: format, bits, bytes per part and per layer, and who can load it."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.arch import FAMILIES, family_of
from quantkit.checkpoint import Checkpoint
from quantkit.engines import Layers, Verdict, verdicts
from quantkit.errors import InputError
from quantkit.expert_check import check_experts
from quantkit.formats import dialect_of
from quantkit.formats.kv_scheme import kv_strategy, summary_of
from quantkit.gguf_view import TypeCount
from quantkit.sources import model_folder

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Inspection:
    """Bytes by scheme, by kind of part and by decoder layer; engines with their verdicts."""

    folder: str
    model_type: str
    dtype: str
    quant_method: str | None
    parameters: int
    bytes: int
    quantized_weights: int
    bits_per_weight: float  # of all parameters
    quantized_bits_per_weight: float | None  # of the quantized layers, scales and all
    schemes: dict[str, int]  # scheme -> number of modules
    part_bytes: dict[str, int]
    layer_bytes: dict[str, int]
    kv_scales: dict[str, Any] | None  # of an FP8 cache: how many for a layer, the smallest and the largest
    gguf_types: dict[str, TypeCount]  # of a GGUF file
    engines: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        types = {kind: count._asdict() for kind, count in self.gguf_types.items()}
        return asdict(self) | {"gguf_types": types, "engines": [verdict.to_dict() for verdict in self.engines]}


def inspect_checkpoint(model: str | Path) -> Inspection:
    """Reads headers and config only, no weights beyond the few small parts that tell a layer's shape."""
    checkpoint = Checkpoint(model_folder(model))
    check_experts(checkpoint)
    formats = checkpoint.formats
    quantized = sum(math.prod(checkpoint.layer_shape(module)) for module in formats)
    part_names = [name for module in formats for name in checkpoint.part_names(module)]
    quantized_bytes = sum(checkpoint.tensors[name].nbytes for name in part_names)
    plain = sum(math.prod(checkpoint.tensors[name].info.shape) for name in checkpoint.plain_names())
    total = sum(stored.nbytes for stored in checkpoint.tensors.values())
    return Inspection(
        folder=str(checkpoint.origin),
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        dtype=checkpoint.dtype,
        quant_method=dialect_of(formats).quant_method if formats else None,
        parameters=quantized + plain,
        bytes=total,
        quantized_weights=quantized,
        bits_per_weight=8 * total / max(quantized + plain, 1),
        quantized_bits_per_weight=8 * quantized_bytes / quantized if quantized else None,
        schemes=dict(Counter(f"{fmt.name} {fmt.describe()}" for fmt in formats.values())),
        part_bytes=_part_bytes(checkpoint),
        layer_bytes=_layer_bytes(checkpoint),
        kv_scales=_kv_scales(checkpoint),
        gguf_types={} if checkpoint.gguf is None else checkpoint.gguf.types,
        engines=tuple(verdicts(layers_of(checkpoint))),
    )


def _kv_scales(checkpoint: Checkpoint) -> dict[str, Any] | None:
    strategy = kv_strategy(checkpoint.config)
    scales = {name: checkpoint.tensor(name) for name in checkpoint.cache_names() if name.endswith("_scale")}
    if strategy is None or not scales:
        return None
    return {"strategy": strategy} | summary_of(scales)


def layers_of(checkpoint: Checkpoint) -> Layers:
    """What the rules about engines look at."""
    gguf_file = checkpoint.gguf is not None
    return Layers(checkpoint.formats, _kept_in_blocks(checkpoint), _experts_apart(checkpoint), gguf_file)


def _experts_apart(checkpoint: Checkpoint) -> bool:
    family = FAMILIES.get(str(checkpoint.config.get("model_type")))
    return bool(family and family.fused) and all(stored.part is None for stored in checkpoint.tensors.values())


def _suffixes(checkpoint: Checkpoint, module: str) -> list[tuple[str, str]]:
    return [(name[len(module) + 1 :], name) for name in checkpoint.part_names(module)]


def _part_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for module in checkpoint.formats:
        for suffix, name in _suffixes(checkpoint, module):
            sizes[suffix] += checkpoint.tensors[name].nbytes
    if of_caches := sum(checkpoint.tensors[name].nbytes for name in checkpoint.cache_names()):
        sizes["scales of a cache"] = of_caches
    sizes["unquantized"] = sum(checkpoint.tensors[name].nbytes for name in checkpoint.plain_names())
    return dict(sizes)


def _layer_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name, stored in checkpoint.tensors.items():
        layer = _LAYER.search(name)
        sizes[f"layer {layer[1]}" if layer else name.removesuffix(".weight")] += stored.nbytes
    return dict(sorted(sizes.items(), key=lambda item: (not item[0].startswith("layer "), _natural(item[0]))))


def _natural(text: str) -> tuple[int, str]:
    number = re.search(r"\d+", text)
    return (int(number[0]) if number else 0, text)


def _kept_in_blocks(checkpoint: Checkpoint) -> tuple[str, ...]:
    if not checkpoint.formats:
        return ()
    try:
        linears = family_of(checkpoint.config).linears(checkpoint.config)
    except InputError:  # a family that quantkit does not quantize can still be looked at
        return ()
    return tuple(module for module in linears if module not in checkpoint.formats)
