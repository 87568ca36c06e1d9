"""Formats of a shape by name: those of `quantkit bench kernels`, and those that recipes write."""

from __future__ import annotations

from quantkit.arch import family_of
from quantkit.errors import InputError, did_you_mean
from quantkit.eval.kernels.cases import FORMATS, UNQUANTIZED
from quantkit.eval.shapes import SHAPES
from quantkit.formats import Format
from quantkit.recipe import Recipe, list_recipes, load_recipe


def check_format_name(shape: str, name: str) -> None:
    """Refuses what `shape_format` would not find; a recipe must have one format for all layers."""
    if name in FORMATS or name == UNQUANTIZED:
        return
    recipes = [recipe.name for recipe in list_recipes() if not recipe.writes_gguf]
    if name not in recipes and not name.endswith((".yaml", ".yml")):
        raise InputError(f"unknown format '{name}'; {did_you_mean(name, (*FORMATS, UNQUANTIZED, *recipes))}")
    shape_format(shape, name, "bfloat16")


def shape_format(shape: str, name: str, dtype: str) -> Format | None:
    """For a model of this dtype; None: unquantized. Where a format and a recipe share a name, they are the same."""
    if name == UNQUANTIZED:
        return None
    return FORMATS[name](dtype) if name in FORMATS else recipe_format(shape, load_recipe(name), dtype)


def recipe_format(shape: str, recipe: Recipe, dtype: str) -> Format | None:
    """What a recipe makes of all linears of a shape."""
    formats = set(recipe.plan(family_of(SHAPES[shape]), SHAPES[shape], dtype).values())
    if len(formats) > 1:
        raise InputError(f"recipe '{recipe.name}' has several formats; a shape takes recipes with one for all layers")
    return formats.pop()
