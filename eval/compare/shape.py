"""Formats of a model that is only a shape."""

from __future__ import annotations

from quantkit.eval.compare.asked import Entry
from quantkit.eval.compare.results import Size
from quantkit.eval.engine.shape_formats import recipe_format
from quantkit.eval.plan.model import read_model
from quantkit.eval.plan.weights import in_format, unquantized
from quantkit.eval.shapes import SHAPES
from quantkit.formats import Format
from quantkit.recipe import load_recipe

STORED = "bfloat16"  # what shapes are without a format


def entry_format(shape: str, entry: Entry, dtype: str = STORED) -> Format | None:
    """The format of all linears of a shape, for a model of this dtype; None: they stay as they are."""
    return None if entry.kind == "baseline" else recipe_format(shape, load_recipe(entry.source), dtype)


def shape_size(shape: str, entry: Entry) -> Size:
    """As it would be stored."""
    model, fmt = read_model(shape, SHAPES[shape]), entry_format(shape, entry)
    assert model.decoder is not None, "shapes are of supported families"
    plan = unquantized(model.decoder) if fmt is None else in_format(model, shape, fmt)
    return Size(plan.bytes, round(plan.linear_bits, 4))
