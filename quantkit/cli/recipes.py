"""quantkit recipes"""

from __future__ import annotations

import click

from quantkit.cli.common import json_option, print_json, print_table


@click.command("recipes", short_help="List the recipes that come with quantkit.")
@json_option
def command(as_json: bool) -> None:
    """List the recipes that come with quantkit, one line each.

    A recipe is a YAML file: method, format, overrides per module. Your own works as `-r path/to/recipe.yaml`.
    """
    from quantkit.recipe import list_recipes

    found = list_recipes()
    if as_json:
        print_json([recipe.to_dict() for recipe in found])
        return
    print_table("Recipes", ("name", "when to use it"), [(recipe.name, recipe.summary) for recipe in found])
