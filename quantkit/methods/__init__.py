"""Quantization methods: the mathematics that turns the weight of a layer into the codes of a format, one file each.

    rtn    round each weight to the nearest value of its format; needs no data, works with every format

A method neither reads nor writes files and knows no model: it sees one layer and a `Format`.
To add one: a file with its function, its name in `_BY_NAME`. Recipes name methods by these names.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quantkit.errors import InputError, did_you_mean
from quantkit.formats import Format, QuantizedWeight
from quantkit.methods import rtn

LayerMethod = Callable[[Tensor, Format], QuantizedWeight]

_BY_NAME: dict[str, LayerMethod] = {"rtn": rtn.quantize_layer}
METHODS: tuple[str, ...] = tuple(_BY_NAME)


def method_named(name: str) -> LayerMethod:
    """The function of a method; unknown names list what exists."""
    if name not in _BY_NAME:
        raise InputError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
    return _BY_NAME[name]
