"""Which part of a model one process holds.

A rank is `stage * tensor + tensor_rank`. The ranks of a stage hold the same blocks, each a share of every linear layer;
of experts, which are never cut, some whole. Stages hold consecutive blocks. The first stage also holds the embedding
and the head, because that is where tokens come in and where they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.runtime.model.config import ModelConfig
from quantkit.stages import Stage

_DOWNS = ("down", "shared_down")  # roles of the linears that end an MLP


@dataclass(frozen=True)
class Ranks:
    """The shape of the group of processes, and the place of one of them in it."""

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0
    experts: bool = False  # whether tensor ranks divide the experts of a layer

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise InputError(f"{name} parallel is {size!r}, but must be a whole number from 1 on")
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank is {self.rank}, but {self.tensor} x {self.pipeline} ranks count from 0")

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.pipeline - 1

    def blocks(self, layers: int) -> range:
        """The blocks of this stage. Where they do not divide evenly, later stages take one more."""
        each, more = divmod(layers, self.pipeline)
        first_larger = self.pipeline - more
        start = self.stage * each + max(0, self.stage - first_larger)
        return range(start, start + each + (self.stage >= first_larger))

    def share(self, size: int) -> slice:
        """Where this tensor rank's part of an even cut lies."""
        each = size // self.tensor
        return slice(self.tensor_rank * each, (self.tensor_rank + 1) * each)

    def own_experts(self, count: int) -> range:
        """The experts of this tensor rank. Where they do not divide evenly, the first ranks have one more: a model of
        60 runs on 8 ranks, and only its memory and speed are those of the ranks with most."""
        each, more = divmod(count, self.tensor)
        start = self.tensor_rank * each + min(self.tensor_rank, more)
        return range(start, start + each + (self.tensor_rank < more))

    def own_modules(self, stage: Stage, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Of a stage's modules, expert by expert, those of this rank's experts; all where it has no experts."""
        if stage.experts is None:
            return modules
        own, each = self.own_experts(stage.experts.count), len(stage.names)
        return modules[own.start * each : own.stop * each]

    def vocabulary(self, vocab: int) -> slice:
        """The tokens whose logits this tensor rank computes: the last ranks may have fewer, or none."""
        each = self.vocabulary_width(vocab)
        return slice(min(self.tensor_rank * each, vocab), min((self.tensor_rank + 1) * each, vocab))

    def vocabulary_width(self, vocab: int) -> int:
        """The largest part of the vocabulary that a tensor rank has."""
        return -(-vocab // self.tensor)

    def kv_heads(self, kv_heads: int) -> slice:
        """KV heads of this tensor rank. Where there are fewer heads than ranks, neighbours hold the same one."""
        if kv_heads >= self.tensor:
            return self.share(kv_heads)
        head = self.tensor_rank * kv_heads // self.tensor
        return slice(head, head + 1)


def local_config(config: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The model as one rank computes it: what its cache, attention and rope tables are made from.

    `vocab` and `hidden` stay those of the whole model.
    """
    return replace(
        config,
        heads=config.heads // ranks.tensor,
        kv_heads=max(1, config.kv_heads // ranks.tensor),
        intermediate=config.intermediate // ranks.tensor,
        windows=tuple(config.windows[layer] for layer in ranks.blocks(config.layers)),
        stages=tuple(
            tuple(_local_stage(config, stage, ranks) for stage in config.stages[layer])
            for layer in ranks.blocks(config.layers)
        ),
    )


def _local_stage(config: ModelConfig, stage: Stage, ranks: Ranks) -> Stage:
    """With the width that a rank has, or as many whole experts."""
    if stage.part.kind == "attention" or ranks.tensor == 1:
        return stage
    if stage.experts is None:
        return replace(stage, width=config.width(stage) // ranks.tensor)
    experts = replace(stage.experts, count=len(ranks.own_experts(stage.experts.count)))
    return replace(stage, width=config.width(stage), experts=experts)


def check_parallel(config: ModelConfig, checkpoint: Checkpoint | None, ranks: Ranks) -> None:
    """Refuses, in one line, what cannot be cut; without a checkpoint, by the model's sizes alone. No weight is read."""
    if ranks.pipeline > config.layers:
        raise InputError(
            f"pipeline parallel is {ranks.pipeline}, but the model has {config.layers} blocks, and every stage needs "
            f"one; use at most {config.layers}"
        )
    _check_experts(config, ranks)
    problem = next(_problems(config, checkpoint, ranks.tensor), None)
    if problem is None:
        return
    works = [size for size in range(1, config.heads + 1) if next(_problems(config, checkpoint, size), None) is None]
    raise InputError(f"tensor parallel is {ranks.tensor}, but {problem}, which it does not divide; {_advice(works)}")


def _check_experts(config: ModelConfig, ranks: Ranks) -> None:
    counts = [stage.experts.count for stages in config.stages for stage in stages if stage.experts]
    if ranks.experts and not counts:
        raise InputError(
            f"expert parallel divides experts, but model_type '{config.family.model_type}' has none; leave it out"
        )
    if ranks.tensor > 1 and counts and not ranks.experts:
        raise InputError(
            f"tensor parallel is {ranks.tensor}, but model_type '{config.family.model_type}' has experts, which are "
            "not cut, but divided among the ranks; add --expert-parallel"
        )
    if ranks.experts and min(counts) < ranks.tensor:
        raise InputError(
            f"tensor parallel is {ranks.tensor}, but there are layers of {min(counts)} experts, and every rank needs "
            f"one; use at most {min(counts)}"
        )


def _advice(works: list[int]) -> str:
    if works == [1]:
        return "this model cannot be cut, use pipeline parallel"
    return f"use {', '.join(map(str, works[:-1]))} or {works[-1]}"


def _problems(config: ModelConfig, checkpoint: Checkpoint | None, tensor: int) -> Iterator[str]:
    """What stands in the way of so many tensor ranks, each as half a sentence."""
    if tensor == 1:
        return
    if config.heads % tensor:
        yield f"the model has {config.heads} attention heads"
    if config.kv_heads % tensor and tensor % config.kv_heads:
        yield f"the model has {config.kv_heads} key-value heads"
    dense = (stage for stages in config.stages for stage in stages if stage.role in _DOWNS and not stage.routed)
    for width in dict.fromkeys(config.width(stage) for stage in dense):
        if width % tensor:
            yield f"the MLPs have {width} channels"
    if config.hidden % tensor:
        yield f"hidden states have {config.hidden} channels"
    if checkpoint is None:
        return
    for layer, stages in enumerate(config.stages):
        for stage in stages:
            if stage.role in ("output", *_DOWNS) and not stage.routed:
                (name,) = config.family.modules(layer, stage)
                gathers = stage.role == "output"
                yield from _layer_problems(checkpoint, name, config.inputs(stage), tensor, act_order_gathers=gathers)


def _layer_problems(
    checkpoint: Checkpoint, name: str, inputs: int, tensor: int, *, act_order_gathers: bool
) -> Iterator[str]:  # fmt: skip
    """Of a layer that is cut by inputs. An attention output in act-order is not: see `shards.py`."""
    fmt = checkpoint.formats.get(name)
    if fmt is None or fmt.needs_all_inputs(inputs // tensor):
        return
    unit = fmt.input_unit(inputs)
    if (inputs // tensor) % unit and not (act_order_gathers and checkpoint.scattered_groups(name) is not None):
        yield f"{name} has {inputs // unit} groups of {unit} inputs"
