"""What is tried: the model as it is, every recipe, and every kind of conversion, each made by a plain command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibration import Calibration
from quantkit.convert import convert
from quantkit.errors import InputError, did_you_mean
from quantkit.pipeline import quantize
from quantkit.recipe import list_recipes, load_recipe
from quantkit.sources import model_folder

AS_IT_IS = "unquantized"
SAMPLES, SEQ_LEN = 8, 128  # of calibration: layouts do not depend on it, and agreement is what is measured


@dataclass(frozen=True)
class Tried:
    """A checkpoint by its folder's name: quantized by a recipe, converted from another one, or neither."""

    name: str
    recipe: str = ""
    changes: tuple[str, ...] = ()  # of the recipe
    source: str = ""  # another checkpoint
    to: str = ""  # a target of `quantkit convert`

    def command(self, model: str, folder: Path) -> str:
        """The command that makes it; nothing for the model as it is."""
        if self.source:
            words = ["quantkit", "convert", str(folder / self.source), "--to", self.to]
        elif self.recipe:
            words = ["quantkit", "quantize", model, "-r", self.recipe, "--samples", str(SAMPLES)]
            words += ["--seq-len", str(SEQ_LEN), "--quality-windows", "0"]
            words += [word for change in self.changes for word in ("--set", change)]
        else:
            return ""
        return shlex.join([*words, "-o", str(folder / self.name)])


def _converted(source: str, to: str) -> Tried:
    return Tried(f"{source}-to-{to}", source=source, to=to)


# Layouts that no recipe writes, but other people's checkpoints have.
CHANGED = (
    Tried("gptq-w4g128-act-order", "gptq-w4g128", ("method.order=desc_act", "format.act_order=true")),
    Tried("fp8-tensor", "fp8", ("format.strategy=tensor",)),
    Tried("gptq-w4g128-kept", "gptq-w4g128", ('keep=["*.mlp.down_proj"]',)),
    Tried("gptq-w4g128-kept-unevenly", "gptq-w4g128", ('keep=["model.layers.0.mlp.down_proj"]',)),
    Tried("rtn-w4w8-mixed", "rtn-w4g128", ('overrides=[{"modules": "*.mlp.down_proj", "bits": 8}]',)),
    Tried("rtn-w4w8-mixed-ct", "rtn-w4g128-ct", ('overrides=[{"modules": "*.mlp.down_proj", "bits": 8}]',)),
)
CONVERSIONS = (
    _converted("gptq-w4g128", "compressed-tensors"),
    _converted("gptq-w4g128", "awq"),
    _converted("gptq-w4g128", "gptq-v2"),
    _converted("gptq-w4g128-to-awq", "gptq"),
    _converted("awq-w4g128", "compressed-tensors"),
    _converted("awq-w4g128", "gptq-v2"),
    _converted("rtn-w4g128-ct", "gptq"),
    _converted("gptq-w4g64-asym", "awq"),
    _converted("gptq-w3g128", "gptq"),
    _converted("gptq-w8", "compressed-tensors"),
    _converted("gptq-w8", "w8a8"),
    _converted("rtn-w8a8", "gptq"),
    _converted("nf4", "nf4-plain"),
    _converted("fp4", "fp4-plain"),
)


def all_tried() -> tuple[Tried, ...]:
    """Sources of conversions come before what is made of them."""
    recipes = [Tried(recipe.name, recipe.name) for recipe in list_recipes() if not recipe.writes_gguf]
    return (Tried(AS_IT_IS), *recipes, *CHANGED, *CONVERSIONS)


def chosen(names: Sequence[str]) -> tuple[Tried, ...]:
    """Those with these names; all without names."""
    known = {tried.name: tried for tried in all_tried()}
    for name in names:
        if name not in known:
            raise InputError(f"unknown checkpoint '{name}'; {did_you_mean(name, known)}")
    return tuple(tried for tried in known.values() if not names or tried.name in names)


def with_sources(wanted: Iterable[Tried]) -> tuple[Tried, ...]:
    """What must be made for these, in order."""
    known = {tried.name: tried for tried in all_tried()}
    needed = {tried.name for tried in wanted}
    for tried in reversed(known.values()):
        if tried.name in needed and tried.source:
            needed.add(tried.source)
    return tuple(tried for tried in known.values() if tried.name in needed)


def make(
    model: str, folder: Path, wanted: Iterable[Tried], device: str, say: Callable[[str], None] = lambda line: None
) -> None:
    """Makes what is not there yet; the model as it is becomes a link to its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / AS_IT_IS
    if not link.exists():
        link.symlink_to(model_folder(model).resolve(), target_is_directory=True)
    for tried in with_sources(wanted):
        if (folder / tried.name).exists():
            continue
        say(tried.command(model, folder))
        if tried.source:
            convert(folder / tried.source, tried.to, folder / tried.name)
        else:
            little = Calibration(samples=SAMPLES, seq_len=SEQ_LEN)
            recipe = load_recipe(tried.recipe, tried.changes)
            output = folder / tried.name
            quantize(model, recipe, output, calibration=little, device=device, quality_windows=0, restart=True)
