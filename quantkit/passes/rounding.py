"""Methods that look at no data: every layer by itself, straight from the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from quantkit.arch import Family
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.passes.result import QuantizedBlock, QuantizedLayer, relative_error
from quantkit.stages import Group


def round_blocks(
    source: Checkpoint,
    family: Family,
    chosen: Mapping[str, Format],
    method: Method,
    device: str,
    on_layer: Callable[[QuantizedLayer], None],
    *,
    first: int = 0,
) -> Iterator[QuantizedBlock]:
    """Blocks from `first` on; layers that are not chosen are left alone."""
    for fused in family.fused_linears(source.config)[first:]:
        layers = []
        for modules in fused:
            if modules[0] not in chosen:  # they share one scheme
                continue
            fmt = chosen[modules[0]]
            for group in [modules] if fmt.scales_tensor else [(module,) for module in modules]:
                for layer in _rounded(source, group, chosen[group[0]], method, device):
                    layers.append(layer)
                    on_layer(layer)
        yield QuantizedBlock(tuple(layers))


def _rounded(source: Checkpoint, modules: Group, fmt: Format, method: Method, device: str) -> Iterator[QuantizedLayer]:
    """Layers as one matrix."""
    weights = [source.tensor(f"{module}.weight").to(device) for module in modules]
    for module, weight in zip(modules, weights, strict=True):
        require_finite(f"{module}.weight", weight)
    rounded = method.round_without_data(torch.cat(weights) if len(weights) > 1 else weights[0], fmt)
    parts = (
        rounded.quantized.split_rows([len(weight) for weight in weights]) if len(weights) > 1 else [rounded.quantized]
    )
    for module, weight, quantized in zip(modules, weights, parts, strict=True):
        error = relative_error(quantized.dequantize(), weight)
        yield QuantizedLayer(module, fmt, quantized, error, dict(rounded.notes or {}))
