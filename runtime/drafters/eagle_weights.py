"""The weights of an EAGLE head in their final place. Embedding and head are the model's where the files have none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError, StorageError
from quantkit.runtime.drafters.eagle_folder import LAYER, EagleFacts
from quantkit.runtime.model.embedding import CodedEmbedding
from quantkit.runtime.model.layers import Block, DenseMlp, Linear, Weights
from quantkit.runtime.model.reader import Reader


@dataclass(frozen=True)
class EagleWeights:
    """Norms that one generation lacks are None; `norm` stands behind the layer."""

    fuse: Linear
    block: Block  # `before_attention` is the norm of the feature; EAGLE-1 has none, and nobody reads it
    embedding: Tensor | CodedEmbedding  # [vocab, hidden]
    embedding_norm: Tensor | None
    state_norms: tuple[Tensor, ...]  # before `fuse`: none, one over all hidden states, or one for each
    norm: Tensor | None
    head: Linear | None  # None: the model's
    tokens: Tensor | None  # int64 [draft vocabulary], the model's number of each of its tokens; None: the same


def load_eagle(facts: EagleFacts, target: Weights, dtype: torch.dtype, device: torch.device) -> EagleWeights:
    with facts.checkpoint.kept_open():
        return _Loader(facts, Reader(facts.checkpoint, facts.config, dtype, device)).load(target)


@dataclass(frozen=True)
class _Loader:
    facts: EagleFacts
    reader: Reader

    def load(self, target: Weights) -> EagleWeights:
        facts, hidden = self.facts, self.facts.config.hidden
        fused = len(facts.tapped) * facts.feature
        return EagleWeights(
            fuse=self._linear(["fc"], [hidden], fused or 2 * hidden),
            block=self._block(),
            embedding=self._embedding(target.embedding),
            embedding_norm=self._norm(f"{LAYER}.input_layernorm") if facts.third else None,
            state_norms=self._state_norms(),
            norm=self._norm("norm") if facts.third else None,
            head=self._head(),
            tokens=self._tokens(),
        )

    def _block(self) -> Block:
        config = self.facts.config
        hidden, third = config.hidden, self.facts.third
        heads, kv_heads = (count * config.head_dim for count in (config.heads, config.kv_heads))
        turned = [self._own_norm(f"{LAYER}.self_attn.{name}_norm", config.head_dim) for name in "qk"]
        before_mlp = self._norm(f"{LAYER}.post_attention_layernorm")
        queries = [f"{LAYER}.self_attn.{name}_proj" for name in "qkv"]
        return Block(
            before_attention=self._norm(f"{LAYER}.hidden_norm") if third else before_mlp,
            qkv=self._linear(queries, [heads, kv_heads, kv_heads], 2 * hidden if third else hidden),
            q_norm=turned[0],
            k_norm=turned[1],
            output=self._linear([f"{LAYER}.self_attn.o_proj"], [hidden], heads),
            after_attention=None,
            before_mlp=before_mlp,
            mlp=DenseMlp(
                self._linear(
                    [f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up")], [config.intermediate] * 2, hidden
                ),
                self._linear([f"{LAYER}.mlp.down_proj"], [hidden], config.intermediate),
            ),
            after_mlp=None,
        )

    def _linear(self, names: list[str], outputs: list[int], inputs: int) -> Linear:
        stored = [self.facts.names[f"{name}.weight"].removesuffix(".weight") for name in names]
        biased = [own for name, own in zip(names, stored, strict=True) if self.facts.has(f"{name}.bias")]
        return self.reader.linear(stored, outputs, inputs, biased=biased)

    def _norm(self, module: str, size: int | None = None) -> Tensor:
        return self.reader.tensor(self.facts.names[f"{module}.weight"], (size or self.facts.config.hidden,))

    def _own_norm(self, module: str, size: int) -> Tensor | None:
        return self._norm(module, size) if self.facts.has(f"{module}.weight") else None

    def _state_norms(self) -> tuple[Tensor, ...]:
        feature, count = self.facts.feature, len(self.facts.tapped)
        if (over_all := self._own_norm("input_norm", count * feature)) is not None:
            return (over_all,)
        each = [self._own_norm(f"fc_norm.{number}", feature) for number in range(count)]
        return tuple(norm for norm in each if norm is not None)

    def _embedding(self, target: Tensor | CodedEmbedding) -> Tensor | CodedEmbedding:
        """Its own, unless it is the model's once more, as that of most heads is."""
        config = self.facts.config
        if not self.facts.has("embed_tokens.weight"):
            if target.shape[1] != config.hidden:
                raise StorageError(
                    f"tensor embed_tokens.weight of the EAGLE head in {self.facts.folder} is missing, and the model's "
                    f"embedding has {target.shape[1]} columns instead of {config.hidden}; download the head again"
                )
            return target
        own = self.reader.tensor(self.facts.names["embed_tokens.weight"], (config.vocab, config.hidden))
        return target if isinstance(target, Tensor) and _same(own, target) else own

    def _head(self) -> Linear | None:
        facts = self.facts
        if not facts.third or not facts.has("lm_head.weight"):
            if facts.config.hidden != facts.feature:
                raise StorageError(
                    f"tensor lm_head.weight of the EAGLE head in {facts.folder} is missing, and the model's head reads "
                    f"{facts.feature} numbers instead of {facts.config.hidden}; download the head again"
                )
            return None
        return self._linear(["lm_head"], [facts.shape("lm_head.weight")[0]], facts.config.hidden)

    def _tokens(self) -> Tensor | None:
        """`d2t` holds how far the model's number of a token is from its own."""
        facts, vocab = self.facts, self.facts.config.vocab
        rows = facts.shape("lm_head.weight")[0] if facts.third and facts.has("lm_head.weight") else vocab
        if not facts.third or not facts.has("d2t"):
            if rows != vocab:
                raise StorageError(
                    f"tensor d2t of the EAGLE head in {facts.folder} is missing: it guesses {rows} tokens of {vocab}, "
                    "and nothing says which; download the head again"
                )
            return None
        offsets = facts.checkpoint.tensor(facts.names["d2t"]).long()
        tokens = torch.arange(len(offsets)) + offsets if offsets.ndim == 1 else offsets
        if tokens.shape != (rows,) or not bool(((tokens >= 0) & (tokens < vocab)).all()):
            raise InputError(
                f"tensor d2t in {facts.folder} does not name {rows} of the model's {vocab} tokens; the head belongs to "
                "another model"
            )
        return tokens.to(self.reader.device)


def _same(own: Tensor, target: Tensor) -> bool:
    return own.shape == target.shape and torch.equal(own, target.to(own.dtype))
