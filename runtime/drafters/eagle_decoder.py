"""What an EAGLE head computes: from a token and the feature in front of it, the feature of that token.

Of position t it reads the feature and the token at t+1, which was chosen by that feature. What it leaves is
the feature of t+1, from which the token at t+2 is guessed; with both it goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.runtime.drafters.eagle_folder import EagleFacts
from quantkit.runtime.drafters.eagle_weights import EagleWeights
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.decoder import AnyDecoder, Decoder
from quantkit.runtime.model.layers import Linear, Weights
from quantkit.runtime.model.ops import Ops
from quantkit.runtime.model.rope import RopeTable


class EagleDecoder(Decoder):
    """A decoder of one block, whose input is not a token alone."""

    def __init__(
        self,
        facts: EagleFacts,
        own: EagleWeights,
        target: AnyDecoder,
        tables: list[RopeTable],
        ops: Ops,
        scratch: Any = None,
    ) -> None:
        """`target` lends its head where there is no other."""
        weights = Weights(own.embedding, (own.block,), own.norm, own.head or Linear(()))
        super().__init__(facts.config, weights, tables, ops, scratch)
        self._facts = facts
        self._own = own
        self._target = target

    @property
    def state_width(self) -> int:
        return self._facts.state

    @torch.inference_mode()
    def fused(self, states: Tensor) -> Tensor:
        """Features [tokens, hidden] from what the model's taps kept of these tokens."""
        if not self._facts.third:
            return states
        norms = self._own.state_norms
        if norms:
            parts = states.chunk(len(norms), dim=1)
            states = torch.cat([self._norm(part, norm) for part, norm in zip(parts, norms, strict=True)], 1)
        return self._own.fuse(states)

    @torch.inference_mode()
    def advance(self, features: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """The features of the batch's tokens, each from that in front of it, which may be overwritten."""
        block, tokens = self._own.block, self.embeddings(batch.ids)
        if self._own.embedding_norm is None:
            x = residual = self._own.fuse(torch.cat([tokens, features], 1))
        else:
            normed = self._norm(features, block.before_attention)
            x = torch.cat([self._norm(tokens, self._own.embedding_norm), normed], 1)
            residual = normed if self._facts.residual_is_normed else features
        x = self._attention(0, block, x, batch, cache)
        x = self._add(x, None, residual, block.before_mlp)
        residual = self._add(self._mlp(block.mlp, x), None, residual, None)
        if self._own.norm is not None and self._facts.output_is_normed:
            return self._norm(residual, self._own.norm)
        return residual

    @torch.inference_mode()
    def guesses(self, features: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] of the token behind the one with each of these features."""
        if self._own.norm is not None and not self._facts.output_is_normed:
            features = self._norm(features, self._own.norm)
        return self._target.logits(features) if self._own.head is None else self._own.head(features)

    def tokens(self, chosen: Tensor) -> Tensor:
        """The model's numbers of tokens of the draft vocabulary; what is no token stays."""
        table = self._own.tokens
        return chosen if table is None else torch.where(chosen < 0, chosen, table[chosen.clamp(min=0)])

    def whole(self, logits: Tensor) -> Tensor:
        """Logits over the model's vocabulary; tokens that it never guesses have no chance."""
        table = self._own.tokens
        if table is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab), float("-inf"))
        return whole.index_copy_(1, table, logits)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self._ops.rms_norm(x.contiguous(), weight, self.config.norm_eps)
        return normed
