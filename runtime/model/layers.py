"""The weights of a decoder in their final place, and linear layers of any format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quantkit.kernels.linear.cpu.slabs import plain
from quantkit.kernels.linear.op import LinearWeight, linear, prepare_plain
from quantkit.runtime.model.embedding import CodedEmbedding


@dataclass(frozen=True)
class Linear:
    """A layer, or several that read the same input: their outputs behind each other.

    `weights` has one entry where they are one matrix for the kernels: plain ones always, quantized ones where they
    could be joined.
    """

    weights: tuple[Tensor | LinearWeight, ...]
    bias: Tensor | None = None
    gathered: bool = False  # reads all inputs and gives some outputs, where others of its kind add: `shards.py`
    served: tuple[Tensor | LinearWeight, ...] = field(init=False, repr=False, compare=False)  # as kernels take them

    def __post_init__(self) -> None:
        object.__setattr__(self, "served", tuple(_prepared(weight) for weight in self.weights))

    @property
    def outputs(self) -> int:
        return sum(weight.shape[0] if isinstance(weight, Tensor) else weight.outputs for weight in self.weights)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.served) == 1:
            return _multiply(x, self.served[0], self.bias)
        y = x.new_empty(x.shape[0], self.outputs)
        start = 0
        for weight in self.served:
            stop = start + (weight.shape[0] if isinstance(weight, Tensor) else weight.outputs)
            _multiply(x, weight, None if self.bias is None else self.bias[start:stop], y[:, start:stop])
            start = stop
        return y


def _prepared(weight: Tensor | LinearWeight) -> Tensor | LinearWeight:
    """For our kernel where it is a plain one of 16 bit on a GPU."""
    return prepare_plain(weight) or weight if isinstance(weight, Tensor) else weight


def _multiply(x: Tensor, weight: Tensor | LinearWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if isinstance(weight, Tensor):
        return plain(x, weight, bias, out)
    return linear(x, weight, bias, out=out)


@dataclass(frozen=True)
class DenseMlp:
    """gate and up as one layer, and down: all of an MLP, or one expert of it."""

    gate_up: Linear
    down: Linear

    gives_term: ClassVar[bool] = False

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def __call__(self, x: Tensor, run: RunDense) -> Tensor:
        return run(self, x)


RunDense = Callable[[DenseMlp, Tensor], Tensor]  # the decoder's: it knows the activation and the other ranks


class Mlp(Protocol):
    """The MLP of a block: a `DenseMlp`, or one with experts (`experts.py`)."""

    gives_term: ClassVar[bool]  # one rank's term of a sum; else all that the ranks have together

    @property
    def linears(self) -> tuple[Linear, ...]: ...

    def __call__(self, x: Tensor, run: RunDense) -> Tensor:
        """x [tokens, hidden] through it; `run` computes the dense ones that it consists of, whole or as terms."""
        ...


@dataclass(frozen=True)
class LatentProjections:
    """Latent attention after the linear that reads hidden states, which gives queries, or their latent, and latents."""

    q_norm: Tensor | None  # with `q_b`, where queries are made from a latent
    q_b: Linear | None
    kv_norm: Tensor
    up: Tensor  # [heads, plain + value, rank]: kv_b decoded, because it is multiplied from both sides
    plain: int  # of a head's key, what does not turn

    @property
    def key_up(self) -> Tensor:
        return self.up[:, : self.plain]

    @property
    def value_up(self) -> Tensor:
        return self.up[:, self.plain :]


@dataclass(frozen=True)
class Block:
    """One decoder block. Norms by role, whatever the family calls them."""

    before_attention: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    after_attention: Tensor | None  # before the residual sum, in families that have it
    before_mlp: Tensor
    mlp: Mlp
    after_mlp: Tensor | None
    latent: LatentProjections | None = None  # where attention is of that kind
    sinks: Tensor | None = None  # [heads], scores of no token that join the softmax, in families that have them

    @property
    def linears(self) -> tuple[Linear, ...]:
        q_b = () if self.latent is None or self.latent.q_b is None else (self.latent.q_b,)
        return self.qkv, *q_b, self.output, *self.mlp.linears


@dataclass(frozen=True)
class Weights:
    """All weights of a model, or those of one rank (`ranks.py`)."""

    # [vocab, hidden]; of several ranks each has its rows, and those of later stages none
    embedding: Tensor | CodedEmbedding
    blocks: tuple[Block, ...]
    norm: Tensor | None  # on the last stage only
    head: Linear  # this rank's part of the vocabulary; without weights on later stages
    kv_scales: Tensor | None = None  # float32 [layers, 2, kv_heads], for an FP8 cache

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of norms and biases; matrices may have fewer bits (`reader.py`)."""
        return self.blocks[0].before_attention.dtype
