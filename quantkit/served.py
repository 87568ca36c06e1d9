"""Layers whose inputs are rounded as an engine rounds them, for formats that quantize activations too."""

from __future__ import annotations

from torch import Tensor, nn

from quantkit.checkpoint import Checkpoint


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
