"""Recipes: one YAML file says one way to quantize a model. Strict, so that a slip of the pen never changes a result.

    summary: One line on what it is and when to use it.
    method: {name: gptq, damping: 0.05}
    format: {name: ct-packed, bits: 4, group_size: 128}
    calibration: {source: notes.txt, samples: 256}
    keep: ["model.layers.0.*"]
    overrides:
      - {modules: "*.mlp.down_proj", bits: 8}

`load_recipe` finds a recipe and checks it; `Recipe.plan` says what it means for one model. The manual is
docs/reference/recipes.md, the reader `file.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantkit.arch import Family
from quantkit.errors import CannotHold, InputError, did_you_mean
from quantkit.formats import Format, Gguf, build, dialect_of
from quantkit.methods import needs_data
from quantkit.recipe.file import Contents, read_recipe

BUNDLED = Path(__file__).parents[1] / "recipes"
_NAMED = 4  # layers in a message, before only some of them are


@dataclass(frozen=True)
class _Rule:
    """The scheme of all modules that match a pattern, and the words of the recipe that say so."""

    words: str
    pattern: str
    fmt: Format | None  # None: keep

    def matches(self, module: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], module) is not None
        return fnmatchcase(module, self.pattern)

    def __str__(self) -> str:
        return f"{self.fmt.describe() if self.fmt else 'kept'} ({self.words})"


class Recipe(Contents):
    """A checked recipe: a frozen value. `name` is the name of its file without the ending."""

    name: str

    @property
    def needs_data(self) -> bool:
        """Whether there is no quantizing without calibration."""
        formats = (rule.fmt for rule in self._rules("bfloat16"))  # any dtype will do
        return self.looks_on or needs_data(self.method.build(), formats, self.target_bits)

    @property
    def looks_on(self) -> bool:
        """Whether calibration data is looked at after all layers are rounded."""
        return self.touch_up > 0 or self.kv_scales is not None

    @property
    def writes_gguf(self) -> bool:
        """Whether the result is a GGUF file, not a folder."""
        return self.format.name == Gguf.name

    def formats(self, model_dtype: str) -> list[Format]:
        """Those that it names, its own last."""
        return [rule.fmt for rule in self._rules(model_dtype) if rule.fmt is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and logs: the name, then the keys as a recipe file has them."""
        contents = self.model_dump(mode="json", exclude_unset=True)
        if not self.method.options:
            contents["method"] = self.method.name
        return {"name": contents.pop("name"), **contents}

    def plan(self, family: Family, config: Mapping[str, Any], model_dtype: str) -> dict[str, Format | None]:
        """The format of every linear layer of a model, in forward order; None where it is left as it is.

        `lm_head` is always left as it is and not listed. Refuses patterns that match nothing, fused layers that would
        get different schemes, and a plan that quantizes nothing or that no checkpoint can describe.
        """
        modules = family.linears(config)
        rules = self._rules(model_dtype)
        for rule in rules:
            self._check_used(rule, modules, family.tied(config))
        chosen = {module: next(rule for rule in rules if rule.matches(module)) for module in modules}
        for fused in [] if self.writes_gguf else family.linear_groups(config):
            self._check_fused([(member, chosen[member]) for member in fused])
        plan = {module: rule.fmt for module, rule in chosen.items()}
        self._check_storable(plan)
        return plan

    def _rules(self, model_dtype: str) -> list[_Rule]:
        """`keep`, then the overrides, then the recipe's format for the rest: the first match wins."""
        name, options = self.format.name, self.format.options
        rules = [_Rule(f"keep '{pattern}'", pattern, None) for pattern in self.keep]
        for override in self.overrides:
            changed = ", ".join(f"{key}: {value}" for key, value in override.options.items()) or "keep"
            fmt = None if override.keep else build(name, options | override.options, model_dtype)
            rules.append(_Rule(f"override '{override.modules}' {changed}", override.modules, fmt))
        return [*rules, _Rule("no override", "*", build(name, options, model_dtype))]

    def _check_used(self, rule: _Rule, modules: list[str], tied: bool) -> None:
        if any(rule.matches(module) for module in modules):
            return
        if rule.matches("lm_head"):
            if rule.fmt is None:  # says aloud what holds anyway
                return
            why = (
                "is this model's embedding matrix (they are tied) and stays as it is" if tied else "is never quantized"
            )
            raise InputError(f"recipe '{self.name}': {rule.words}: lm_head {why}; remove this override")
        raise InputError(
            f"recipe '{self.name}': {rule.words}: the pattern matches no linear layer of this model; "
            f"their names look like {modules[0]} and {modules[-1]}"
        )

    def _check_fused(self, members: list[tuple[str, _Rule]]) -> None:
        if len({rule.fmt for _, rule in members}) == 1:
            return
        if len(members) > _NAMED:  # of many experts, the first that has each scheme
            schemes_of = [rule.fmt for _, rule in members]
            members = [member for place, member in enumerate(members) if member[1].fmt not in schemes_of[:place]]
        schemes = ", ".join(f"{module} would be {rule}" for module, rule in members)
        raise InputError(
            f"recipe '{self.name}': {schemes}; the runtime and other engines run these layers as one matrix, so they "
            "must share one scheme: write the pattern so that it matches all of them or none"
        )

    def _check_storable(self, plan: Mapping[str, Format | None]) -> None:
        """Now rather than after hours of quantizing."""
        quantized = {module: fmt for module, fmt in plan.items() if fmt is not None}
        if not quantized:
            raise InputError(f"recipe '{self.name}' keeps every linear layer of this model; nothing would be quantized")
        if self.writes_gguf:  # a file says the type of every tensor
            return
        try:
            dialect_of(quantized).write(quantized, [module for module, fmt in plan.items() if fmt is None])
        except CannotHold as error:
            raise CannotHold(f"recipe '{self.name}': {error}") from error


def list_recipes() -> list[Recipe]:
    """The recipes that come with the package, by name."""
    return [load_recipe(name) for name in _bundled_names()]


def is_bundled(recipe: Recipe) -> bool:
    """Whether it comes with the package and is as it comes: reads the one that has its name."""
    return recipe.name in _bundled_names() and recipe == load_recipe(recipe.name)


def load_recipe(name_or_path: str, changes: Sequence[str] = ()) -> Recipe:
    """A bundled recipe by its name, or a file ending in .yaml; with `KEY=VALUE` changes such as `format.bits=3`."""
    file = Path(name_or_path)
    if file.suffix not in (".yaml", ".yml"):
        if name_or_path not in _bundled_names():
            hint = did_you_mean(name_or_path, _bundled_names())
            raise InputError(f"unknown recipe '{name_or_path}'; {hint} A file of your own must end in .yaml")
        file = BUNDLED / f"{name_or_path}.yaml"
    elif not file.is_file():
        hint = did_you_mean(file.stem, _bundled_names())
        raise InputError(f"no recipe file {file}; bundled recipes go by their name alone: {hint}")
    contents = read_recipe(file, changes)
    return Recipe(name=file.stem, **{key: getattr(contents, key) for key in contents.model_fields_set})


def _bundled_names() -> list[str]:
    return sorted(file.stem for file in BUNDLED.glob("*.yaml"))
