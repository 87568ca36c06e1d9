"""The two steps in which a method treats the layers that share an input: choose input scales, then round.

Both see the stacked weights [out, in] of these layers and the statistics of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, IntegerWeight, QuantizedWeight
from quantkit.methods import awq, gptq, smoothquant
from quantkit.methods.grid import search_grid
from quantkit.methods.losses import better_rows, output_loss
from quantkit.methods.options import AwqOptions, GptqOptions, MethodOptions, SmoothQuantOptions
from quantkit.methods.statistics import InputStatistics

UNREACHED = "calibration never reached this layer: plainly rounded"


@dataclass(frozen=True)
class Rounded:
    """A rounded weight; its loss and plain rounding's row by row where H is known; what else the log should say."""

    quantized: QuantizedWeight
    loss: Tensor | None = None  # [out]
    rounding_loss: Tensor | None = None  # [out]
    notes: Mapping[str, float | str] | None = None


def check_format(options: MethodOptions, fmt: Format) -> None:
    """Refuses a format that cannot hold what the method produces."""
    if isinstance(options, GptqOptions):
        gptq.require_integer("gptq", fmt)
        scattered = options.order == "desc_act" and getattr(fmt, "group_size", -1) != -1
        if scattered and not getattr(fmt, "act_order", False):
            raise InputError(
                f"method 'gptq' with order desc_act scatters the groups, which '{fmt.name}' cannot store so; "
                "use format gptq with act_order: true, or order static, which costs nothing at run time"
            )
    elif isinstance(options, AwqOptions):
        gptq.require_integer("awq", fmt)
    elif isinstance(options, SmoothQuantOptions) and not (isinstance(fmt, IntegerFormat) and fmt.input_rounding):
        raise InputError(f"method 'smoothquant' is for 8-bit weights and activations (ct-int8), not for '{fmt.name}'")


def needs_hessian(options: MethodOptions) -> bool:
    return isinstance(options, GptqOptions | AwqOptions)


def scales_inputs(options: MethodOptions) -> bool:
    """Whether the method wants to scale inputs, for which the model family must have folds."""
    return isinstance(options, AwqOptions | SmoothQuantOptions) or (
        isinstance(options, GptqOptions) and options.scaling == "awq"
    )


def choose_scales(
    options: MethodOptions, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Callable[[Tensor], Tensor]
) -> awq.ScaleChoice:
    """The input scales that suit these layers best."""
    if isinstance(options, SmoothQuantOptions):
        integer = gptq.require_integer("smoothquant", fmt)  # only these can be divided once they are rounded
        return smoothquant.search_scales(weight, integer, inputs.absmax, inputs.sample, options.points, tie)
    points = options.points if isinstance(options, AwqOptions) else AwqOptions().points
    return awq.search_scales(weight, gptq.require_integer("awq", fmt), inputs.require_hessian(), points, tie)


def round_weight(options: MethodOptions, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
    """The weight as codes of the format, by the method's way of rounding."""
    if isinstance(options, GptqOptions):
        result = gptq.quantize_layer(weight, fmt, inputs.require_hessian(), options)
        notes: dict[str, float | str] = {"damping": result.damping}
        if result.damping > options.damping:
            notes["damping_reason"] = "H had no Cholesky factor with less"
        if result.damping == 0:
            notes["warning"] = UNREACHED
        return Rounded(result.quantized, result.loss, result.rounding_loss, notes)
    if isinstance(options, AwqOptions):
        return _rounded_awq(options, weight, fmt, inputs.require_hessian())
    return Rounded(fmt.quantize(weight))


def _rounded_awq(options: AwqOptions, weight: Tensor, fmt: Format, hessian: Tensor) -> Rounded:
    fmt = gptq.require_integer("awq", fmt)
    plain: IntegerWeight = fmt.quantize(weight)
    plain_loss = output_loss(weight, plain, hessian)
    if not bool(hessian.diagonal().any()):
        return Rounded(plain, plain_loss, plain_loss, {"warning": UNREACHED})
    if not options.clip:
        return Rounded(plain, plain_loss, plain_loss)
    clipped = search_grid(weight, fmt, hessian)
    quantized, loss = better_rows(clipped, output_loss(weight, clipped, hessian), plain, plain_loss)
    return Rounded(quantized, loss, plain_loss)
