"""Experts and routers of a checkpoint against config.json, from headers: refused before weights are read."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.arch import FAMILIES, Config, Family
from quantkit.arch.sizes import MOST_LAYERS, size
from quantkit.checkpoint import Checkpoint
from quantkit.errors import StorageError
from quantkit.stages import Stage

Shape = tuple[int, ...]


def check_experts(checkpoint: Checkpoint) -> None:
    """Refuses experts and routers that are missing or of another shape, and routing that no router of the family does.

    Says nothing of families without experts, or of those that quantkit does not know.
    """
    family = FAMILIES.get(str(checkpoint.config.get("model_type")))
    if family is None or not family.may_have_experts:
        return
    with checkpoint.kept_open():
        for layer in range(size(checkpoint.config, "num_hidden_layers", MOST_LAYERS)):
            for name, wanted in _wanted(family, layer, checkpoint.config):
                _check(checkpoint, f"{family.blocks}.{layer}.{name}", wanted)


def _wanted(family: Family, layer: int, config: Config) -> Iterator[tuple[str, Shape]]:
    """The tensors of a layer's routers and experts by their names in it, routers first."""
    hidden = size(config, "hidden_size")
    routed = [stage for stage in family.stages(layer, config) if stage.experts is not None]
    for experts in {stage.experts: None for stage in routed if stage.experts}:
        yield f"{experts.router}.weight", (experts.count, hidden)
        if experts.correction is not None:
            yield experts.correction, (experts.count,)
    for stage in routed:
        for name in stage.linears:
            yield f"{name}.weight", _linear(stage, config, hidden)


def _linear(stage: Stage, config: Config, hidden: int) -> Shape:
    width = stage.width or size(config, "intermediate_size")
    return (hidden, width) if stage.role == "down" else (width, hidden)


def _check(checkpoint: Checkpoint, name: str, wanted: Shape) -> None:
    module = name.removesuffix(".weight")
    if module in checkpoint.formats:
        found: Shape = checkpoint.layer_shape(module)
    elif name in checkpoint.tensors:
        found = checkpoint.tensors[name].info.shape
    else:
        raise StorageError(f"tensor {name} is missing in {checkpoint.folder}; the checkpoint is incomplete")
    if found != wanted:
        raise StorageError(
            f"tensor {name} in {checkpoint.folder} has shape {list(found)}, but config.json asks for {list(wanted)}"
        )
