"""Methods that look at no data: every layer by itself, straight from the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.passes.result import QuantizedBlock, QuantizedLayer, relative_error


def round_blocks(
    source: Checkpoint,
    blocks: list[list[str]],
    chosen: Mapping[str, Format],
    method: Method,
    device: str,
    on_layer: Callable[[QuantizedLayer], None],
    *,
    first: int = 0,
) -> Iterator[QuantizedBlock]:
    """Blocks (lists of module names) from `first` on; layers that are not chosen are left alone."""
    for modules in blocks[first:]:
        layers = []
        for module in modules:
            if module in chosen:
                layers.append(_rounded(source, module, chosen[module], method, device))
                on_layer(layers[-1])
        yield QuantizedBlock(tuple(layers))


def _rounded(source: Checkpoint, module: str, fmt: Format, method: Method, device: str) -> QuantizedLayer:
    weight = source.tensor(f"{module}.weight").to(device)
    require_finite(f"{module}.weight", weight)
    rounded = method.round_without_data(weight, fmt)
    error = relative_error(rounded.quantized.dequantize(), weight)
    return QuantizedLayer(module, fmt, rounded.quantized, error, dict(rounded.notes or {}))
