"""From a checkpoint into final device memory, tensor by tensor; every quantized layer is tried before it is trusted.

A plain group of linears (queries, keys, values) is allocated as one matrix and filled from the files. A quantized layer
is read, laid out for its kernel and tried on a random vector against the meaning of its format: a checkpoint or kernel
that would serve garbage is refused by the layer's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.errors import QuantkitError, StorageError
from quantkit.formats import Format, QuantizedWeight
from quantkit.kernels.linear.joining import join
from quantkit.kernels.linear.op import LinearWeight, linear, prepare
from quantkit.kernels.reference import linear as reference
from quantkit.progress import Progress, silent
from quantkit.runtime.layers import Block, Linear, Weights
from quantkit.runtime.model_config import ModelConfig

# Largest relative difference between kernel and reference. Both round in the dtype of the activations.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class _Reader:
    """Tensors of one checkpoint on their way to a device."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        place = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(place, name)
        return place

    def fill(self, place: Tensor, name: str) -> None:
        """Reads a tensor straight into its place."""
        stored = self.checkpoint.tensor(name)
        if stored.shape != place.shape:
            raise StorageError(
                f"tensor {name} in {self.checkpoint.folder} has shape {list(stored.shape)}, "
                f"but config.json asks for {list(place.shape)}"
            )
        if stored.dtype not in _TOLERANCE:
            raise StorageError(
                f"tensor {name} in {self.checkpoint.folder} holds {str(stored.dtype)[6:]} codes without their scales; "
                "the checkpoint is incomplete, quantize or download it again"
            )
        place.copy_(stored)
        require_finite(name, place)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> Linear:
        """Layers that read one input, by full module names."""
        quantized = [name in self.checkpoint.formats for name in names]
        if not any(quantized):
            weights: tuple[Tensor | LinearWeight, ...] = (self._plain(names, outputs, inputs),)
        else:
            loaded = [self._weight(name, size, inputs) for name, size in zip(names, outputs, strict=True)]
            joined = None if any(isinstance(weight, Tensor) for weight in loaded) else join(loaded)  # type: ignore[arg-type]
            weights = tuple(loaded) if joined is None else (joined,)
        return Linear(weights, self._bias(names, outputs))

    def _plain(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> Tensor:
        whole = torch.empty(sum(outputs), inputs, dtype=self.dtype, device=self.device)
        for name, part in zip(names, whole.split(list(outputs)), strict=True):
            self.fill(part, f"{name}.weight")
        return whole

    def _weight(self, name: str, outputs: int, inputs: int) -> Tensor | LinearWeight:
        if name not in self.checkpoint.formats:
            return self.tensor(f"{name}.weight", (outputs, inputs))
        quantized = self.checkpoint.quantized(name, self.device)
        if quantized.shape != (outputs, inputs):
            raise StorageError(
                f"{name} in {self.checkpoint.folder} is a layer of {list(quantized.shape)}, "
                f"but config.json asks for {[outputs, inputs]}"
            )
        fmt = self.checkpoint.formats[name]
        with self.checkpoint.naming(name):
            weight = prepare(fmt, quantized, self.dtype)
            try_layer(name, fmt, quantized, weight, self.dtype, self.device)
        return weight

    def _bias(self, names: Sequence[str], outputs: Sequence[int]) -> Tensor | None:
        biased = set(self.config.family.biased(self.checkpoint.config))
        if not any(_inside(name) in biased for name in names):
            return None
        return torch.cat([self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, outputs, strict=True)])


def _inside(name: str) -> str:
    """`self_attn.q_proj` of `model.layers.7.self_attn.q_proj`."""
    return name.split(".", 3)[-1]


def try_layer(
    name: str, fmt: Format, quantized: QuantizedWeight, weight: LinearWeight, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuses a layer whose kernel does not compute what its format means, or that gives NaN."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, quantized.shape[1], generator=generator, device=device).to(dtype)
    found = linear(x, weight).float()
    wanted = reference.linear(x.float(), fmt, quantized)
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if not error < _TOLERANCE[dtype]:  # NaN too
        broken = not bool(torch.isfinite(wanted).all())
        reason = "its weights decode to NaN or Inf" if broken else f"its kernel is off by {error:.1e} (relative)"
        raise QuantkitError(f"layer {name} would give garbage: {reason}; quantize or download the checkpoint again")


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_block: Progress = silent,
) -> Weights:
    """Every weight of a model, on its device."""
    reader = _Reader(checkpoint, config, dtype, device)
    embedding = reader.tensor("model.embed_tokens.weight", (config.vocab, config.hidden))
    blocks = load_blocks(checkpoint, config, dtype, device, on_block)
    norm = reader.tensor("model.norm.weight", (config.hidden,))
    head = Linear((embedding,)) if config.tied else reader.linear(["lm_head"], [config.vocab], config.hidden)
    return Weights(embedding, blocks, norm, head)


def load_blocks(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_block: Progress = silent,
) -> tuple[Block, ...]:
    reader = _Reader(checkpoint, config, dtype, device)
    blocks = []
    for layer in range(config.layers):
        blocks.append(_block(reader, layer))
        on_block(f"block {layer}", config.layers)
    return tuple(blocks)


def _block(reader: _Reader, layer: int) -> Block:
    config, prefix = reader.config, f"{reader.config.family.blocks}.{layer}"
    linears = [
        reader.linear([f"{prefix}.{name}" for name in group], outputs, inputs)
        for group, outputs, inputs in zip(
            config.family.groups, config.group_outputs, config.group_inputs, strict=True
        )
    ]  # fmt: skip

    def norm(name: str, size: int = config.hidden) -> Tensor:
        return reader.tensor(f"{prefix}.{name}.weight", (size,))

    sandwich = config.family.norm == "sandwich"
    return Block(
        before_attention=norm("input_layernorm"),
        qkv=linears[0],
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.family.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.family.qk_norm else None,
        output=linears[1],
        after_attention=norm("post_attention_layernorm") if sandwich else None,
        before_mlp=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate_up=linears[2],
        down=linears[3],
        after_mlp=norm("post_feedforward_layernorm") if sandwich else None,
    )
