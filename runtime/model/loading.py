"""All weights of a model from a checkpoint into final device memory, block by block (`reader.py`: layer by layer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quantkit.arch.sizes import LatentSizes
from quantkit.checkpoint import Checkpoint
from quantkit.formats import Gguf
from quantkit.host_memory import return_free_memory
from quantkit.kernels.card import runs_kernels
from quantkit.kernels.linear.grouped.weight import GroupedWeight
from quantkit.progress import Progress, silent
from quantkit.runtime.model.config import ROUTED, ModelConfig
from quantkit.runtime.model.embedding import EMBEDDING, CodedEmbedding, embedding_of_head
from quantkit.runtime.model.expert_stacks import TRIED_ROWS, read_stack, why_not_stacked
from quantkit.runtime.model.experts import ExpertMlp, GroupedMlp, SharedExpert, rule_of
from quantkit.runtime.model.kv_scales import read_kv_scales
from quantkit.runtime.model.layers import Block, DenseMlp, LatentProjections, Linear, Mlp, Weights
from quantkit.runtime.model.lm_head import head_in_bits
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.reader import Reader
from quantkit.runtime.model.shards import GroupShare, Share, share_of_block
from quantkit.stages import Experts, Stage

ENDS = "16-bit"  # arithmetic of embedding and output layer, which few tokens of a step reach
_HEAD_ROWS = 1 << 13  # of an output layer in blocks that are laid out at a time, to need little memory beside it


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_block: Progress = silent,
    ranks: Ranks = Ranks(),  # noqa: B008  (a value)
    head_bits: int | None = None,
    kv_dtype: str = "auto",
    arithmetic: str | None = None,
) -> Weights:
    """Every weight of a model, or those of one rank, on its device. `config` is the whole model's.

    With a cache in FP8, scales that the checkpoint brings for it come along. `arithmetic` is that of the blocks; the
    output layer, which few tokens of a step reach, stays in 16 bits.
    """
    kv_scales = read_kv_scales(checkpoint, config, device, ranks) if kv_dtype == "fp8" else None
    reader = Reader(checkpoint, config, dtype, device, arithmetic=ENDS)
    embedding, head = load_ends(reader, ranks, head_bits)
    blocks = load_blocks(checkpoint, config, dtype, device, on_block, ranks, arithmetic)
    norm = reader.tensor("model.norm.weight", (config.hidden,)) if ranks.last_stage else None
    return_free_memory()
    return Weights(embedding, blocks, norm, head, kv_scales)


def load_ends(reader: Reader, ranks: Ranks, head_bits: int | None) -> tuple[Tensor | CodedEmbedding, Linear]:
    """The embedding and the output layer, as far as this rank has them."""
    config, checkpoint = reader.config, reader.checkpoint
    rows = ranks.vocabulary(config.vocab) if ranks.first_stage else slice(0, 0)
    embedding: Tensor | CodedEmbedding = reader.embedding(rows)
    with checkpoint.kept_open():
        head = head_in_bits(_head(reader, embedding, ranks), head_bits, reader.dtype, reader.prepared)
    if config.tied and len(head.weights) == 1:
        embedding = embedding_of_head(embedding, head.weights[0])
    return embedding, head


def _head(reader: Reader, embedding: Tensor | CodedEmbedding, ranks: Ranks) -> Linear:
    config = reader.config
    if not ranks.first_stage:
        return Linear(())
    if config.tied and isinstance(embedding, Tensor):
        return Linear((embedding,))
    name, rows = EMBEDDING if config.tied else "lm_head", ranks.vocabulary(config.vocab)
    share = None
    if isinstance(reader.checkpoint.formats.get(name), Gguf):
        starts = range(rows.start, rows.stop, _HEAD_ROWS)
        parts = tuple(slice(start, min(start + _HEAD_ROWS, rows.stop)) for start in starts)
        share = GroupShare((Share(parts, slice(0, config.hidden)),))
    elif ranks.tensor > 1:
        share = GroupShare((Share((rows,), slice(0, config.hidden)),))
    return reader.linear([name], [config.vocab], config.hidden, share)


def load_blocks(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_block: Progress = silent,
    ranks: Ranks = Ranks(),  # noqa: B008
    arithmetic: str | None = None,
) -> tuple[Block, ...]:
    reader = Reader(checkpoint, config, dtype, device, arithmetic=arithmetic)
    own = ranks.blocks(config.layers)
    blocks = []
    for layer in own:
        with checkpoint.kept_open():  # no longer: what was read of a mapped file counts as memory
            blocks.append(load_block(reader, layer, ranks))
        on_block(f"block {layer}", len(own))
    return tuple(blocks)


def load_block(reader: Reader, layer: int, ranks: Ranks = Ranks()) -> Block:  # noqa: B008  (a value)
    return _BlockReader(reader, layer, ranks).block()


def has_routed_kernels(device: torch.device) -> bool:
    return runs_kernels(device)


@dataclass(frozen=True)
class _BlockReader:
    """One block on its way to a device."""

    reader: Reader
    layer: int
    ranks: Ranks

    def block(self) -> Block:
        config = self.reader.config
        attention, mlp = self._stages["qkv"].part, self._stages["gate_up"].part
        return Block(
            before_attention=self._norm(attention.norm),
            qkv=self._linear(self._stages["qkv"]),
            q_norm=self._norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            output=self._linear(self._stages["output"]),
            after_attention=None if attention.post_norm is None else self._norm(attention.post_norm),
            before_mlp=self._norm(mlp.norm),
            mlp=self._mlp(),
            after_mlp=None if mlp.post_norm is None else self._norm(mlp.post_norm),
            latent=None if config.latent is None else self._latent(config.latent),
            sinks=self._sinks() if config.family.sinks else None,
        )

    def _sinks(self) -> Tensor:
        """Of this rank's heads."""
        heads = self.reader.config.heads
        return self.reader.tensor(self._full("self_attn.sinks"), (heads,))[self.ranks.share(heads)].clone()

    def _latent(self, sizes: LatentSizes) -> LatentProjections:
        kv_b, q_b = self._stages["kv_b"], self._stages.get("q_b")
        up = self.reader.decoded(self._full(kv_b.names[0]), self.reader.config.outputs(kv_b)[0], sizes.rank)
        by_head = up.unflatten(0, (-1, sizes.expanded))
        if self.ranks.tensor > 1:
            by_head = by_head[self.ranks.share(self.reader.config.heads)].clone()  # lets go of the other heads
        return LatentProjections(
            q_norm=None if q_b is None else self._norm("self_attn.q_a_layernorm", sizes.query_rank),
            q_b=None if q_b is None else self._linear(q_b),
            kv_norm=self._norm("self_attn.kv_a_layernorm", sizes.rank),
            up=by_head,
            plain=sizes.plain,
        )

    @cached_property
    def _stages(self) -> dict[str, Stage]:
        return {stage.role: stage for stage in self.reader.config.stages[self.layer]}

    @cached_property
    def _biased(self) -> frozenset[str]:
        return frozenset(self.reader.config.family.biased(self.layer, self.reader.checkpoint.config))

    @cached_property
    def _shares(self) -> dict[str, GroupShare]:
        reader, ranks = self.reader, self.ranks
        return share_of_block(reader.checkpoint, reader.config, ranks, self.layer) if ranks.tensor > 1 else {}

    def _linear(self, stage: Stage) -> Linear:
        config = self.reader.config
        return self.reader.linear(
            config.family.modules(self.layer, stage),
            config.outputs(stage),
            config.inputs(stage),
            self._shares.get(stage.role),
            biased=[self._full(name) for name in stage.names if name in self._biased],
        )

    def _mlp(self) -> Mlp:
        """Dense, or experts by the names that each of them has in the files."""
        config, experts = self.reader.config, self._stages["gate_up"].experts
        if experts is None:
            return next(self._dense_mlps())
        routing, first = experts.routing, self._own_experts(experts).start
        beside = (self._shared_expert(), self._correction())
        why_not = why_not_stacked(config, self.layer, self.reader.checkpoint.formats)
        if has_routed_kernels(self.reader.device) and why_not is None:
            gate_up, down = map(self._stack, ROUTED)
            rule = rule_of(experts.per_token, routing)
            return GroupedMlp(
                self._router(experts),
                gate_up,
                down,
                rule,
                config.activation,
                *beside,
                clip=config.clip,
                float32=routing.float32,
                first=first,
            )
        in_16_bits = replace(self, reader=replace(self.reader, arithmetic="16-bit"))  # as routed kernels compute
        mlps = tuple(in_16_bits._dense_mlps())
        return ExpertMlp(self._router(experts), mlps, experts.per_token, routing, *beside, first)

    def _own_experts(self, experts: Experts) -> range:
        return self.ranks.own_experts(experts.count)

    def _router(self, experts: Experts) -> Linear:
        reader = self._in_float32 if experts.routing.float32 else self
        return reader._kept(experts.router, experts.count, biased=experts.router_biased)

    def _stack(self, role: str) -> GroupedWeight:
        config, stage = self.reader.config, self._stages[role]
        modules = self.ranks.own_modules(stage, config.family.modules(self.layer, stage))
        biased = self._biased.issuperset(stage.linears)
        return read_stack(self.reader, modules, config.outputs(stage)[0], config.inputs(stage), biased=biased)

    def _dense_mlps(self) -> Iterator[DenseMlp]:
        """Of every expert of this rank; without experts, the only one."""
        gate_up, down = self._stages["gate_up"].by_expert, self._stages["down"].by_expert
        if (experts := self._stages["gate_up"].experts) is not None:
            own = self._own_experts(experts)
            gate_up, down = gate_up[own.start : own.stop], down[own.start : own.stop]
        quick = replace(self, reader=replace(self.reader, tried_rows=TRIED_ROWS))
        for number, stages in enumerate(zip(gate_up, down, strict=True)):
            yield DenseMlp(*map((quick if number else self)._linear, stages))

    def _shared_expert(self) -> SharedExpert | None:
        if "shared_gate_up" not in self._stages:
            return None
        gate_up, down = self._stages["shared_gate_up"], self._stages["shared_down"]
        gate = None if gate_up.gate is None else self._kept(gate_up.gate, 1)
        return SharedExpert(DenseMlp(self._linear(gate_up), self._linear(down)), gate)

    def _correction(self) -> Tensor | None:
        experts = self._stages["gate_up"].experts
        if experts is None or experts.correction is None:
            return None
        return self._in_float32.reader.tensor(self._full(experts.correction), (experts.count,))

    @property
    def _in_float32(self) -> _BlockReader:
        return replace(self, reader=replace(self.reader, dtype=torch.float32, keeps_halves=False))

    def _kept(self, name: str, outputs: int, *, biased: bool = False) -> Linear:
        """A small linear of the block that quantizers leave as it is; it reads hidden states."""
        names = [self._full(name)]
        return self.reader.linear(names, [outputs], self.reader.config.hidden, biased=names if biased else ())

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        return self.reader.tensor(f"{self._full(name)}.weight", (size or self.reader.config.hidden,))

    def _full(self, name: str) -> str:
        return f"{self.reader.config.family.blocks}.{self.layer}.{name}"
