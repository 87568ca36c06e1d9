"""Keys of a recipe that only some formats allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.formats import Awq, CtPacked, Gptq, IntegerFormat, build, dialect_with
from quantkit.formats.kv_scheme import STRATEGIES

if TYPE_CHECKING:
    from quantkit.recipe.file import Contents, Source

_BITS = (2, 8)  # the least and the most that `target_bits` may ask for
_ONE_SCHEME = (Awq.name, Gptq.name)  # layouts of grids that ct-packed stores too, and may mix


def check_target_bits(recipe: Contents, source: Source) -> None:
    """Bits can be chosen layer by layer only where one checkpoint may mix them and nobody else sets them."""
    if recipe.target_bits is None:
        return
    least, most = _BITS
    if not least <= recipe.target_bits <= most:
        raise source.error(
            "target_bits", f"'target_bits' is {recipe.target_bits:g}, but must be a number from {least} to {most}"
        )
    if recipe.format.name != CtPacked.name:
        raise source.error(
            "target_bits",
            f"'target_bits' mixes layers of different bits, which format '{recipe.format.name}' cannot hold; "
            f"use format.name: {CtPacked.name}, or leave 'target_bits' out",
        )
    for index, override in enumerate(recipe.overrides):
        if override.options:
            raise source.error(
                f"overrides.{index}",
                f"'overrides.{index}' sets options of '{override.modules}', but 'target_bits' chooses them for every "
                "layer; remove one of the two (an override with keep: true may stay)",
            )


def target_bits_changes(recipe: Contents, target_bits: float) -> tuple[str, ...]:
    """What `--target-bits` changes: the target, and a layout that has one scheme for the one that can mix its grid."""
    target = f"target_bits={target_bits}"
    if recipe.format.name not in _ONE_SCHEME:
        return (target,)
    fmt = build(recipe.format.name, recipe.format.options, "bfloat16")  # any dtype will do
    assert isinstance(fmt, IntegerFormat)
    sym = str(fmt.sym).lower()
    return f"format={{name: {CtPacked.name}, group_size: {fmt.group_size}, sym: {sym}}}", target


def check_kv_scales(recipe: Contents, source: Source) -> None:
    if recipe.kv_scales is None:
        return
    if recipe.kv_scales not in STRATEGIES:
        raise source.error(
            "kv_scales",
            f"'kv_scales' is '{recipe.kv_scales}', but must be {STRATEGIES[0]} (a layer has one scale for keys and one "
            f"for values) or {STRATEGIES[1]} (every head has)",
        )
    if not dialect_with(recipe.format.name).holds_kv_scales:
        raise source.error(
            "kv_scales",
            f"'kv_scales' are kept by compressed-tensors checkpoints, not beside format '{recipe.format.name}'; use "
            f"format.name: {CtPacked.name} or another ct- format, or leave 'kv_scales' out",
        )
