"""The weights of a model in a format: exact bytes, and in which arithmetic its products run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.eval.plan.model import Decoder, PlannedModel
from quantkit.formats import Format, Shape
from quantkit.recipe import Recipe
from quantkit.stages import Experts

UNQUANTIZED = "bf16"
KEPT_BYTES = 2  # of a weight that stays in 16 bit


@dataclass(frozen=True)
class RoutedBytes:
    """Of experts, `per_token` of which are chosen for a token."""

    bytes: int  # of all of them
    count: int
    per_token: int

    def read(self, tokens: float) -> int:
        """Of the experts that at least one of so many tokens chose, on average; all are chosen equally often."""
        missed: float = (1 - self.per_token / self.count) ** tokens
        return round(self.bytes * (1 - missed))


@dataclass(frozen=True)
class WeightPlan:
    """All weights of a model. `bytes` lie in memory; `read` of them are read for every step, experts not counted."""

    name: str  # of a recipe, or bf16
    scheme: str  # such as `W4 g128 sym`
    bytes: int
    read: int
    linear_bytes: int  # of the linears in the blocks
    linear_bits: float  # bits for one of their weights, scales and all
    parameters: int
    operations: dict[str, int]  # of the linears and lm_head for one token, by arithmetic: bf16, fp8, int8
    head_operations: int  # of those, lm_head's; always in bf16
    routed: tuple[RoutedBytes, ...] = ()

    def read_for(self, tokens: float) -> int:
        """Bytes that a step with so many tokens reads."""
        return self.read + sum(part.read(tokens) for part in self.routed)

    @property
    def bits(self) -> float:
        """Bits for one parameter of the whole model."""
        return 8 * self.bytes / self.parameters

    @property
    def arithmetic(self) -> str:
        """That most operations run in."""
        return max(self.operations, key=lambda name: self.operations[name])


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a recipe makes of every linear of a model. Hashed by identity, as the model is."""

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
    linears = weigh_linears(chosen, decoder)
    operations = {"bf16": 0} | linears.operations
    operations["bf16"] += head
    kept = KEPT_BYTES * (decoder.embedding + decoder.head + decoder.other)
    return WeightPlan(
        name=chosen.name,
        scheme=chosen.scheme,
        bytes=linears.bytes + kept,
        # Of an embedding that is not the head too, a step reads a row for each token: next to nothing.
        read=linears.always_read + KEPT_BYTES * (decoder.embedding + decoder.other),
        linear_bytes=linears.bytes,
        linear_bits=8 * linears.bytes / decoder.linear_weights,
        parameters=decoder.parameters,
        operations=operations,
        head_operations=head,
        routed=linears.routed,
    )


@dataclass(frozen=True)
class LinearWeights:
    """The linears in the blocks of a decoder."""

    always_read: int  # bytes that every step reads
    routed: tuple[RoutedBytes, ...]
    operations: dict[str, int]  # for one token, by arithmetic

    @property
    def bytes(self) -> int:
        return self.always_read + sum(part.bytes for part in self.routed)


def weigh_linears(chosen: Chosen, decoder: Decoder) -> LinearWeights:
    """In the chosen formats. A token is multiplied by its own experts only."""
    kinds: dict[tuple[Experts | None, Format | None, Shape], list[str]] = {}
    for module, shape in decoder.linears.items():
        kinds.setdefault((decoder.experts.get(module), chosen.formats[module], shape), []).append(module)
    sizes, operations = Counter[Experts | None](), Counter[str]()
    for (experts, fmt, shape), modules in kinds.items():
        sizes[experts] += len(modules) * chosen.nbytes(modules[0], shape)
        used, of = (1, 1) if experts is None else (experts.per_token, experts.count)
        operations[_arithmetic(fmt)] += 2 * math.prod(shape) * len(modules) * used // of
    routed = (RoutedBytes(size, each.count, each.per_token) for each, size in sizes.items() if each is not None)
    return LinearWeights(sizes[None], tuple(routed), dict(operations))


def _arithmetic(fmt: Format | None) -> str:
    """Weight-only formats multiply in 16 bit; those that round the inputs too, in 8."""
    rounding = None if fmt is None else fmt.input_rounding
    return "bf16" if rounding is None else rounding.arithmetic
