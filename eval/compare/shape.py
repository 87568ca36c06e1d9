"""Formats of a model that is only a shape."""

from __future__ import annotations

from quantkit.arch import family_of
from quantkit.errors import InputError
from quantkit.eval.compare.asked import Entry
from quantkit.eval.compare.results import Size
from quantkit.eval.plan.model import read_model
from quantkit.eval.plan.weights import in_format, unquantized
from quantkit.eval.shapes import SHAPES
from quantkit.formats import Format
from quantkit.recipe import load_recipe


def shape_format(shape: str, entry: Entry) -> Format | None:
    """The format of all linears of a shape; None: they stay as they are."""
    if entry.kind == "baseline":
        return None
    config = SHAPES[shape]
    formats = set(load_recipe(entry.source).plan(family_of(config), config, "bfloat16").values())
    if len(formats) > 1:
        raise InputError(f"recipe '{entry.name}' has several formats; a shape takes recipes with one for all layers")
    return formats.pop()


def shape_size(shape: str, fmt: Format | None) -> Size:
    model = read_model(shape, SHAPES[shape])
    assert model.decoder is not None, "shapes are of supported families"
    plan = unquantized(model.decoder) if fmt is None else in_format(model, shape, fmt)
    return Size(plan.bytes, round(plan.linear_bits, 4))
