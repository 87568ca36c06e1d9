"""Linear layers: every format in every configuration that a table, a default or the tuner may choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from compile_matrix.case import HALVES, Case
from compile_matrix.weights import BLOCKS, served_on, weight_of
from quantkit.kernels.card import Card
from quantkit.kernels.linear import dispatch
from quantkit.kernels.linear.dense import weight as dense
from quantkit.kernels.linear.eight_bit.many_outliers import DECODED_FROM
from quantkit.kernels.linear.weight import Choice
from quantkit.kernels.linear.weight_only import float8_codes
from quantkit.kernels.linear.weight_only.dequantize import dequantize, to_float8_rows
from quantkit.kernels.linear.weight_only.weight import PackedWeight

OUTPUTS, INPUTS = 768, 512  # which all tiles divide
VOCABULARY = 262_208


def linear_cases(card: Card) -> Iterator[Case]:
    for name in (*served_on(card), *BLOCKS):
        weight = weight_of(name, OUTPUTS, INPUTS)
        for way in _ways(weight, card):
            yield Case(f"{name} {way}", lambda dtype, weight=weight, way=way: _run(weight, way, dtype), way.tried)
        if isinstance(weight, PackedWeight) and card.has_float8:
            scales = torch.ones(weight.rows)
            yield Case(f"{name} to float8", lambda _, weight=weight, scales=scales: to_float8_rows(weight, scales))
            yield from _codes_in_float8(name, weight)
    with_outliers = weight_of("llm-int8", OUTPUTS, INPUTS)
    decoded = Way("eight_bit", with_outliers.default(DECODED_FROM, card).config, DECODED_FROM, tried=False)
    yield Case("llm-int8 decoded once", lambda dtype: _run(with_outliers, decoded, dtype))
    for outputs in (OUTPUTS, VOCABULARY):
        plain = {dtype: dense.lay_out(_unwritten(outputs, INPUTS, dtype)) for dtype in HALVES}
        for way in _ways(plain[torch.bfloat16], card, tables=outputs == OUTPUTS):
            launch = lambda dtype, way=way, plain=plain: _run(plain[dtype], way, dtype)  # noqa: E731
            yield Case(f"plain {outputs} {way}", launch, way.tried)


def _codes_in_float8(name: str, weight: PackedWeight) -> Iterator[Case]:
    for place, config in enumerate(float8_codes.TRIED if float8_codes.supports(weight) else ()):

        def launch(dtype: torch.dtype, config: float8_codes.CodesConfig = config) -> None:
            x = torch.zeros(2 * config.tokens, weight.inputs, dtype=dtype)
            float8_codes.matmul(x, weight, config)

        yield Case(f"{name} codes in float8 {config}", launch, tried=place > 0)


def _unwritten(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """A weight that nobody reads; what is not written takes no memory."""
    return torch.empty(outputs, inputs, dtype=dtype)


@dataclass(frozen=True)
class Way:
    kernel: str
    config: Any
    tokens: int
    tried: bool

    def __str__(self) -> str:
        return f"{self.kernel} {self.config} for {self.tokens}"


def _ways(weight: Any, card: Card, *, tables: bool = True) -> list[Way]:
    """Each once: what a table has for any shape and the defaults, then what the tuner tries."""
    table = dispatch.table_of("nvidia-h200") if tables and card.has_warpgroups else {}
    ways = []
    for most in weight.buckets:
        chosen = [weight.default(most, card)]
        for kind in (weight.kind, *weight.relatives):
            for entries in table.get(kind, {}).values():
                if str(most) in entries:
                    chosen.append(dispatch.from_entry(entries[str(most)], weight.kernels, ""))
        ways += [_way(choice, most, tried=False) for choice in chosen]
        ways += [_way(choice, most, tried=True) for choice in weight.candidates(most)]
    found: dict[tuple[str, Any], Way] = {}
    for way in sorted(ways, key=lambda way: way.tried):
        found.setdefault((way.kernel, way.config), way)
    return list(found.values())


def _way(choice: Choice, tokens: int, *, tried: bool) -> Way:
    config = choice.config
    if hasattr(config, "splits"):
        config = replace(config, splits=min(config.splits, 1))  # more are a number that kernels are given
    return Way(choice.kernel, config, tokens, tried)


def _run(weight: Any, way: Way, dtype: torch.dtype) -> None:
    if way.kernel == "dequantize":
        dequantize(weight, dtype)
    elif way.kernel not in ("scaled_mm", "cublas"):  # which are torch's
        x = torch.zeros(way.tokens, weight.inputs, dtype=dtype)
        weight.kernels[way.kernel].run(x, weight, way.config, None, None)
