"""The weights of a model in a format: exact bytes, and in which arithmetic its products run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.eval.plan.model import Decoder, PlannedModel
from quantkit.formats import Format, Shape
from quantkit.recipe import Recipe

UNQUANTIZED = "bf16"
KEPT_BYTES = 2  # of a weight that stays in 16 bit


@dataclass(frozen=True)
class WeightPlan:
    """All weights of a model. `bytes` lie in memory; `read` of them are read for every step."""

    name: str  # of a recipe, or bf16
    scheme: str  # such as `W4 g128 sym`
    bytes: int
    read: int
    linear_bytes: int  # of the linears in the blocks
    linear_bits: float  # bits for one of their weights, scales and all
    parameters: int
    operations: dict[str, int]  # of the linears and lm_head for one token, by arithmetic: bf16, fp8, int8
    head_operations: int  # of those, lm_head's; always in bf16

    @property
    def bits(self) -> float:
        """Bits for one parameter of the whole model."""
        return 8 * self.bytes / self.parameters

    @property
    def arithmetic(self) -> str:
        """That most operations run in."""
        return max(self.operations, key=lambda name: self.operations[name])


@dataclass(frozen=True)
class Chosen:
    """What a recipe makes of every linear of a model."""

    name: str  # of the recipe, or bf16
    scheme: str
    formats: Mapping[str, Format | None]  # by module; None: kept in 16 bit
    target_bits: float | None = None  # on average, where each layer's own are found during the run

    def nbytes(self, module: str, shape: Shape) -> int:
        """Of one linear; InputError where its format cannot hold it."""
        fmt, count = self.formats[module], math.prod(shape)
        if fmt is None:
            return KEPT_BYTES * count
        fmt.check_layer(module, shape)
        return fmt.nbytes(shape) if self.target_bits is None else round(self.target_bits * count / 8)


def keep(decoder: Decoder) -> Chosen:
    """Everything in 16 bit."""
    return Chosen(UNQUANTIZED, "16 bit", dict.fromkeys(decoder.linears))


def choose(model: PlannedModel, recipe: Recipe) -> Chosen:
    """The formats of a recipe; InputError where the recipe refuses the model."""
    decoder = _supported(model)
    chosen = recipe.plan(decoder.config.family, decoder.raw, model.dtype)
    if recipe.target_bits is None:
        schemes = ", ".join(dict.fromkeys(fmt.describe() for fmt in chosen.values() if fmt is not None))
        return Chosen(recipe.name, schemes, chosen)
    return Chosen(recipe.name, f"{recipe.target_bits:g} bits on average", chosen, recipe.target_bits)


def unquantized(decoder: Decoder) -> WeightPlan:
    return weigh(keep(decoder), decoder)


def quantized(model: PlannedModel, recipe: Recipe) -> WeightPlan:
    """What a recipe makes of a model; InputError where the recipe or its format refuses it."""
    return weigh(choose(model, recipe), _supported(model))


def in_format(model: PlannedModel, name: str, fmt: Format) -> WeightPlan:
    """Every linear in one format."""
    decoder = _supported(model)
    return weigh(Chosen(name, fmt.describe(), dict.fromkeys(decoder.linears, fmt)), decoder)


def _supported(model: PlannedModel) -> Decoder:
    if model.decoder is None:
        raise InputError(model.remark)
    return model.decoder


def weigh(chosen: Chosen, decoder: Decoder) -> WeightPlan:
    """All weights of a decoder in the chosen formats."""
    head = 2 * decoder.embedding  # lm_head is as large, and the same matrix where they are tied
    linear_bytes, operations = weigh_linears(chosen, decoder.linears)
    operations = {"bf16": 0} | operations
    operations["bf16"] += head
    kept = KEPT_BYTES * (decoder.embedding + decoder.head + decoder.other)
    return WeightPlan(
        name=chosen.name,
        scheme=chosen.scheme,
        bytes=linear_bytes + kept,
        # Of an embedding that is not the head too, a step reads a row for each token: next to nothing.
        read=linear_bytes + KEPT_BYTES * (decoder.embedding + decoder.other),
        linear_bytes=linear_bytes,
        linear_bits=8 * linear_bytes / decoder.linear_weights,
        parameters=decoder.parameters,
        operations=operations,
        head_operations=head,
    )


def weigh_linears(chosen: Chosen, shapes: Mapping[str, Shape]) -> tuple[int, dict[str, int]]:
    """Bytes of linears of these shapes, and their operations for one token by arithmetic."""
    total, operations = 0, dict[str, int]()
    for module, shape in shapes.items():
        arithmetic = _arithmetic(chosen.formats[module])
        operations[arithmetic] = operations.get(arithmetic, 0) + 2 * math.prod(shape)
        total += chosen.nbytes(module, shape)
    return total, operations


def _arithmetic(fmt: Format | None) -> str:
    """Weight-only formats multiply in 16 bit; those that round the inputs too, in 8."""
    rounding = None if fmt is None else fmt.input_rounding
    return "bf16" if rounding is None else rounding.arithmetic
