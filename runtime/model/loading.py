"""From a checkpoint into final device memory, tensor by tensor; every quantized layer is tried before it is trusted.

A plain group of linears (queries, keys, values) is allocated as one matrix and filled from the files. A quantized layer
is read, laid out for its kernel and tried on a random vector against the meaning of its format: a checkpoint or kernel
that would serve garbage is refused by the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.errors import QuantkitError, StorageError
from quantkit.formats import Format, Index, QuantizedWeight, Shape
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.op import LinearWeight, linear, prepare
from quantkit.kernels.reference import linear as reference
from quantkit.progress import Progress, silent
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.experts import ExpertMlp, SharedExpert
from quantkit.runtime.model.layers import Block, DenseMlp, Linear, Mlp, Weights
from quantkit.runtime.model.lm_head import head_in_bits
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.shards import GroupShare, Share, length, pieces, share_of_block
from quantkit.stages import Stage

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
        self.fill(place, name, shape)
        return place

    def fill(
        self,
        place: Tensor,
        name: str,
        shape: tuple[int, ...],
        outputs: Index | None = None,
        inputs: Index | None = None,
    ) -> None:
        """Reads a tensor of this shape, or a part of it, straight into its place. Files are mapped: parts are all that
        is read."""
        stored = self.checkpoint.tensor(name)
        if stored.shape != shape:
            raise StorageError(
                f"tensor {name} in {self.checkpoint.folder} has shape {list(stored.shape)}, "
                f"but config.json asks for {list(shape)}"
            )
        if stored.dtype not in _TOLERANCE:
            raise StorageError(
                f"tensor {name} in {self.checkpoint.folder} holds {str(stored.dtype)[6:]} codes without their scales; "
                "the checkpoint is incomplete, quantize or download it again"
            )
        part = stored if outputs is None else stored[outputs]
        place.copy_(part if inputs is None else part[:, inputs])
        require_finite(name, place)

    def linear(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        share: GroupShare | None = None,
        *,
        biased: bool = False,
    ) -> Linear:
        """Layers that read one input, by full module names and whole sizes; a share of them where one is given."""
        if share is None:
            shares = [Share((slice(0, size),), slice(0, inputs)) for size in outputs]
        else:
            shares = list(share.modules)
        modules = list(zip(names, outputs, shares, strict=True))
        if not any(name in self.checkpoint.formats for name in names):
            weights: tuple[Tensor | LinearWeight, ...] = (self._plain(modules, inputs),)
        else:
            loaded = [weight for module in modules for weight in self._weights(*module, inputs, whole=share is None)]
            joined = None if any(isinstance(weight, Tensor) for weight in loaded) else join(loaded)  # type: ignore[arg-type]
            weights = tuple(loaded) if joined is None else (joined,)
        bias = self._bias(modules) if biased and (share is None or share.adds_bias) else None
        return Linear(weights, bias, gathered=share is not None and share.gathered)

    def _plain(self, modules: Sequence[tuple[str, int, Share]], inputs: int) -> Tensor:
        sections = [
            (name, outputs, section, share.inputs) for name, outputs, share in modules for section in share.outputs
        ]
        sizes = [length(section) for _, _, section, _ in sections]
        whole = torch.empty(sum(sizes), length(modules[0][2].inputs), dtype=self.dtype, device=self.device)
        for (name, outputs, section, columns), part in zip(sections, whole.split(sizes), strict=True):
            self.fill(part, f"{name}.weight", (outputs, inputs), section, columns)
        return whole

    def _weights(
        self, name: str, outputs: int, share: Share, inputs: int, *, whole: bool
    ) -> Iterator[Tensor | LinearWeight]:
        """A module's weight, or the pieces of a rank's share of it."""
        if name not in self.checkpoint.formats:
            yield self._plain([(name, outputs, share)], inputs)
            return
        fmt = self.checkpoint.formats[name]
        if whole:
            quantized = self.checkpoint.quantized(name, self.device)
            self._check_shape(name, quantized.shape, (outputs, inputs))
            yield self.prepared(name, fmt, quantized)
            return
        self._check_shape(name, self.checkpoint.layer_shape(name), (outputs, inputs))
        for section in share.outputs:
            for piece in pieces(section, fmt.output_unit):
                part = self.checkpoint.quantized_part(name, piece, share.inputs, self.device)
                yield self.prepared(name, fmt, part)

    def _check_shape(self, name: str, found: Shape, wanted: Shape) -> None:
        if found != wanted:
            raise StorageError(
                f"{name} in {self.checkpoint.folder} is a layer of {list(found)}, "
                f"but config.json asks for {list(wanted)}"
            )

    def prepared(self, name: str, fmt: Format, quantized: QuantizedWeight) -> LinearWeight:
        with self.checkpoint.naming(name):
            weight = prepare(fmt, quantized, self.dtype)
            try_layer(name, fmt, quantized, weight, self.dtype, self.device)
        return weight

    def _bias(self, modules: Sequence[tuple[str, int, Share]]) -> Tensor:
        whole = [(self.tensor(f"{name}.bias", (size,)), share) for name, size, share in modules]
        return torch.cat([bias[section] for bias, share in whole for section in share.outputs])


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
    ranks: Ranks = Ranks(),  # noqa: B008  (a value)
    head_bits: int | None = None,
) -> Weights:
    """Every weight of a model, or those of one rank, on its device. `config` is the whole model's."""
    reader = _Reader(checkpoint, config, dtype, device)
    rows = ranks.vocabulary(config.vocab) if ranks.first_stage else slice(0, 0)
    embedding = torch.empty(rows.stop - rows.start, config.hidden, dtype=dtype, device=device)
    if ranks.first_stage:
        reader.fill(embedding, "model.embed_tokens.weight", (config.vocab, config.hidden), rows)
    blocks = load_blocks(checkpoint, config, dtype, device, on_block, ranks)
    norm = reader.tensor("model.norm.weight", (config.hidden,)) if ranks.last_stage else None
    head = head_in_bits(_head(reader, embedding, ranks), head_bits, dtype, reader.prepared)
    return Weights(embedding, blocks, norm, head)


def _head(reader: _Reader, embedding: Tensor, ranks: Ranks) -> Linear:
    config = reader.config
    if not ranks.first_stage:
        return Linear(())
    if config.tied:
        return Linear((embedding,))
    rows = ranks.vocabulary(config.vocab)
    share = GroupShare((Share((rows,), slice(0, config.hidden)),)) if ranks.tensor > 1 else None
    return reader.linear(["lm_head"], [config.vocab], config.hidden, share)


def load_blocks(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_block: Progress = silent,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> tuple[Block, ...]:
    reader = _Reader(checkpoint, config, dtype, device)
    own = ranks.blocks(config.layers)
    blocks = []
    for layer in own:
        blocks.append(_block(reader, layer, ranks))
        on_block(f"block {layer}", len(own))
    return tuple(blocks)


def _block(reader: _Reader, layer: int, ranks: Ranks) -> Block:
    config, family = reader.config, reader.config.family
    shares = share_of_block(reader.checkpoint, config, ranks, layer) if ranks.tensor > 1 else {}
    biased = family.biased(layer, reader.checkpoint.config)
    stages = {stage.role: stage for stage in config.stages[layer]}

    def linear(stage: Stage) -> Linear:
        names, outputs, inputs = family.modules(layer, stage), config.outputs(stage), config.inputs(stage)
        return reader.linear(names, outputs, inputs, shares.get(stage.role), biased=stage.names[0] in biased)

    def norm(name: str, size: int = config.hidden) -> Tensor:
        return reader.tensor(f"{family.blocks}.{layer}.{name}.weight", (size,))

    attention, mlp = stages["qkv"].part, stages["gate_up"].part
    return Block(
        before_attention=norm(attention.norm),
        qkv=linear(stages["qkv"]),
        q_norm=norm("self_attn.q_norm", config.head_dim) if family.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if family.qk_norm else None,
        output=linear(stages["output"]),
        after_attention=None if attention.post_norm is None else norm(attention.post_norm),
        before_mlp=norm(mlp.norm),
        mlp=_mlp(reader, layer, stages, linear),
        after_mlp=None if mlp.post_norm is None else norm(mlp.post_norm),
    )


def _mlp(reader: _Reader, layer: int, stages: dict[str, Stage], linear: Callable[[Stage], Linear]) -> Mlp:
    """Dense, or experts by the names that each of them has in the files, and what every token runs through beside."""
    gate_up, down = stages["gate_up"], stages["down"]
    mlps = tuple(map(DenseMlp, map(linear, gate_up.by_expert), map(linear, down.by_expert)))
    experts = gate_up.experts
    if experts is None:
        return mlps[0]

    def plain(name: str, outputs: int) -> Linear:
        return reader.linear([f"{reader.config.family.blocks}.{layer}.{name}"], [outputs], reader.config.hidden)

    shared = None
    if "shared_gate_up" in stages:
        gate = stages["shared_gate_up"].gate
        mlp = DenseMlp(linear(stages["shared_gate_up"]), linear(stages["shared_down"]))
        shared = SharedExpert(mlp, None if gate is None else plain(gate, 1))
    return ExpertMlp(plain(experts.router, experts.count), mlps, experts.per_token, experts.routing, shared)
