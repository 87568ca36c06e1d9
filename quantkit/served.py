"""Layers whose inputs are rounded as an engine rounds them, for formats that quantize activations too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from quantkit.checkpoint import Checkpoint
from quantkit.formats import Format
from quantkit.formats.base import InputRounding


def serve_inputs(linear: nn.Module, checkpoint: Checkpoint, module: str) -> None:
    """From now on the linear sees its inputs as a kernel of the module's format does."""
    fmt = checkpoint.formats[module]
    rounding = fmt.input_rounding
    if rounding is None:
        return
    quantized = checkpoint.quantized(module, next(linear.parameters()).device) if rounding.calibrated else None

    def served(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return fmt.served_inputs(inputs[0], quantized)

    linear.register_forward_pre_hook(served)


def rounds_tokens(fmt: Format) -> bool:
    """Whether a format rounds each token to float8 by a scale of its own."""
    return fmt.input_rounding == InputRounding("fp8")


@contextmanager
def reads_as_served(block: nn.Module, names: Sequence[str], formats: Mapping[str, Format]) -> Iterator[None]:
    """Within, those of the linears whose formats round each token to float8 read it so."""
    rounded = {name: formats[name] for name in names if rounds_tokens(formats[name])}
    hooks = [
        block.get_submodule(name).register_forward_pre_hook(partial(_round_inputs, fmt))
        for name, fmt in rounded.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round_inputs(fmt: Format, _: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return fmt.served_inputs(inputs[0])
