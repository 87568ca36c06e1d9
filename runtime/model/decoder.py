"""The decoder: one function for every family in `quantkit/arch/`, over a batch of any mixture of sequences.

The residual sum and the norm behind it are one kernel, so a block hands over the output of its MLP, and the next block
(or the final norm) adds it. Between pipeline stages the sum alone travels, and the next stage begins with the norm.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.arch.family import LATENT_EPS
from quantkit.runtime.model import latent_attention
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.embedding import CodedEmbedding
from quantkit.runtime.model.latent_attention import LatentStep, divide_step
from quantkit.runtime.model.layers import Block, DenseMlp, Linear, Mlp, Weights
from quantkit.runtime.model.ops import Ops
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.rope import RopeTable
from quantkit.runtime.model.taps import Taps
from quantkit.runtime.model.tensor_group import Group, OneRank


class AnyDecoder(Protocol):
    """What is asked of a decoder beside the scheduler's steps: of one process alone, or of all ranks together."""

    config: ModelConfig
    weights: Weights

    def hidden_states(self, batch: Batch, cache: KvCache) -> Tensor: ...

    def embeddings(self, ids: Tensor, scale: float | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Decoder:
    """Hidden states of a batch. Holds no state of requests; the cache belongs to the caller."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        tables: list[RopeTable],
        ops: Ops,
        scratch: Any = None,
        group: Group = OneRank(),  # noqa: B008  (has no state)
        ranks: Ranks = Ranks(),  # noqa: B008
    ) -> None:
        """`scratch` is attention's, for as many sequences as a step may have; calls without one allocate theirs.

        Config, weights and tables are those of this rank (`local_config`); `group` are the tensor ranks of its stage.
        """
        self.config = config
        self.weights = weights
        self.tables = tables
        self._ops = ops
        self._scratch = scratch
        self._group = group
        self._ranks = ranks
        self.taps: Taps | None = None

    @torch.inference_mode()
    def hidden_states(self, batch: Batch, cache: KvCache, received: Tensor | None = None) -> Tensor:
        """What the head reads, [tokens, hidden]. Writes the new keys and values into the cache.

        A stage that is not the last returns what the next one goes on from, as `received`, which it overwrites.
        """
        ops, config, blocks = self._ops, self.config, self.weights.blocks
        residual = self.embeddings(batch.ids, config.embedding_scale) if received is None else received
        x: Tensor = ops.rms_norm(residual, blocks[0].before_attention, config.norm_eps, plus_one=config.plus_one)
        latent_step = None if config.latent is None else divide_step(batch, cache, config.latent, ops)
        following = [*(block.before_attention for block in blocks[1:]), self.weights.norm]
        for layer, (block, next_norm) in enumerate(zip(blocks, following, strict=True)):
            if self.taps is not None:
                self.taps.take(layer, residual)
            if latent_step is None:
                x = self._attention(layer, block, x, batch, cache)
            else:
                x = self._latent_attention(layer, block, x, batch, cache, latent_step)
            x = self._add(x, block.after_attention, residual, block.before_mlp)
            x = self._mlp(block.mlp, x)
            x = self._add(x, block.after_mlp, residual, next_norm)
        if self.taps is not None:
            self.taps.take(len(blocks), residual)
            self.taps.take_last(x)
        return x

    def tapped(self, rows: slice | Tensor) -> Tensor | None:
        """What the taps kept of these tokens of the last batch."""
        return None if self.taps is None else self.taps.rows[rows]

    @torch.inference_mode()
    def embeddings(self, ids: Tensor, scale: float | None = None) -> Tensor:
        """Of tokens, [tokens, hidden], on every rank of the first stage: the one that has a token's row adds it."""
        first = self._ranks.vocabulary(self.config.vocab).start
        own = ids - first if first else ids  # those of others have no row here
        table, dtype = self.weights.embedding, self.weights.dtype
        if isinstance(table, CodedEmbedding):
            own, table = table.look_up(own)
        if table.dtype == dtype:
            return self._group.all_reduce(self._ops.embed(own, table, scale=scale))
        rows: Tensor = self._ops.embed(own, table).to(dtype)  # scaled in the dtype of the activations
        return self._group.all_reduce(rows if scale is None else rows * scale)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] in the model's dtype, on every rank of the first stage."""
        logits: Tensor = self.weights.head(hidden)
        cap = self.config.logit_cap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)  # in place: there may be many
        if self._ranks.tensor == 1:
            return logits
        missing = self._ranks.vocabulary_width(self.config.vocab) - logits.shape[1]
        logits = self._group.all_gather(torch.nn.functional.pad(logits, (0, missing)))
        return logits[:, : self.config.vocab].contiguous()

    def _whole(self, layer: Linear, x: Tensor) -> Tensor:
        """What a layer that is cut over the tensor ranks gives, from each rank's part of its inputs."""
        if layer.gathered:
            return self._group.all_gather(layer(self._group.all_gather(x)))
        return self._group.all_reduce(layer(x))

    def _attention(self, layer: int, block: Block, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        config, table = self.config, self.tables[layer]
        keys, values, k_scale, v_scale, key_centres = cache.layers[layer]
        q = self._ops.rotate_and_cache(
            block.qkv(x),
            batch.positions,
            table.cos,
            table.sin,
            batch.kv_slots,
            keys,
            values,
            config.heads,
            key_scales=k_scale,
            value_scales=v_scale,
            key_centres=key_centres,
            q_norm=block.q_norm,
            k_norm=block.k_norm,
            eps=config.norm_eps,
            plus_one=config.plus_one,
        )
        attended = self._ops.attend(
            q,
            keys,
            values,
            batch.page_table,
            batch.context_lengths,
            batch.query_starts,
            scale=config.attention_scale,
            max_queries=batch.max_queries,
            window=config.windows[layer],
            soft_cap=config.attention_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            ancestors=batch.ancestors,
            sinks=block.sinks,
            scratch=self._scratch,
        )
        return self._whole(block.output, attended.flatten(1))

    def _latent_attention(
        self, layer: int, block: Block, x: Tensor, batch: Batch, cache: KvCache, step: LatentStep
    ) -> Tensor:
        sizes, own = self.config.latent, block.latent
        assert sizes is not None
        assert own is not None
        q, kept = block.qkv(x).split((block.qkv.outputs - sizes.kept, sizes.kept), dim=1)
        if own.q_b is not None:
            q = own.q_b(self._ops.rms_norm(q, own.q_norm, LATENT_EPS))
        plain, turning = q.unflatten(1, (-1, sizes.query)).split((sizes.plain, sizes.rope), dim=2)
        table, pages = self.tables[layer], cache.pages[layer, 0]
        scales = None if cache.scales is None else cache.scales[layer, 0]
        turned = self._ops.rotate_latent(
            turning,
            kept,
            own.kv_norm,
            batch.positions,
            table.cos,
            table.sin,
            batch.kv_slots,
            pages,
            eps=LATENT_EPS,
            interleaved=sizes.interleaved,
            scales=scales,
        )
        attended = latent_attention.attend(
            step,
            plain,
            turned,
            pages,
            own,
            self._ops,
            scale=self.config.attention_scale,
            cache_scale=scales,
            scratch=self._scratch,
        )
        return self._whole(block.output, attended.flatten(1))

    def _mlp(self, mlp: Mlp, x: Tensor) -> Tensor:
        return self._group.all_reduce(mlp(x, self._term)) if mlp.gives_term else mlp(x, self._dense_mlp)

    def _dense_mlp(self, mlp: DenseMlp, x: Tensor) -> Tensor:
        return self._whole(mlp.down, self._activated(mlp, x))

    def _term(self, mlp: DenseMlp, x: Tensor) -> Tensor:
        """What this rank adds to a sum over all of them; what is gathered, rank 0 adds."""
        if not mlp.down.gathered:
            return mlp.down(self._activated(mlp, x))
        whole = self._dense_mlp(mlp, x)
        return whole if self._group.rank == 0 else torch.zeros_like(whole)

    def _activated(self, mlp: DenseMlp, x: Tensor) -> Tensor:
        between: Tensor = self._ops.gated_activation(mlp.gate_up(x), self.config.activation, clip=self.config.clip)
        return between

    def _add(self, x: Tensor, own_norm: Tensor | None, residual: Tensor, next_norm: Tensor | None) -> Tensor:
        """residual += x (through its own norm where the family has one); then the norm that follows, where one does."""
        eps, plus_one = self.config.norm_eps, self.config.plus_one
        if own_norm is not None:
            x = self._ops.rms_norm(x, own_norm, eps, plus_one=plus_one)
        if next_norm is None:
            return residual.add_(x)
        following: Tensor = self._ops.add_rms_norm(x, residual, next_norm, eps, plus_one=plus_one)
        return following
