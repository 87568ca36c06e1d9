"""How far the heads' guesses are from what the model itself says, and which way they must go.

The target of head i at position t is the model's own distribution at t+i, not the text's token: what is accepted while
serving is what the model says. Logits are large (rows times vocabulary), so each piece of a text gets its loss and its
gradient at once and lets them go; automatic differentiation sees the heads only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantkit.checkpoint import Checkpoint
from quantkit.runtime.engine.engine import Engine


@dataclass(frozen=True)
class LmHead:
    """The model's own, decoded where it is quantized."""

    weight: Tensor  # [vocab, hidden]
    cap: float | None = None  # soft cap of logits, in families that have one

    @classmethod
    def of(cls, engine: Engine, checkpoint: Checkpoint) -> LmHead:
        weights = engine.runner.decoder.weights
        (weight,) = weights.head.weights
        if not isinstance(weight, Tensor):
            weight = checkpoint.weight("lm_head", weights.dtype, weights.embedding.device)
        return cls(weight.to(weights.dtype), engine.config.logit_cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] in float32."""
        logits = functional.linear(hidden.to(self.weight.dtype), self.weight).float()
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def hidden_gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Of hidden states, float32, from that of the logits they gave; overwrites the latter."""
        if self.cap is not None:
            gradient.mul_(1 - (logits / self.cap).square())
        return (gradient.to(self.weight.dtype) @ self.weight).float()


@torch.no_grad()
def guess_loss(lm_head: LmHead, ahead: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy against the model's own distributions: its sum for each head [heads], and the gradient of `ahead`.

    `ahead` [heads, rows, hidden] are the guesses at the first `rows` of consecutive positions, `states` [rows + heads,
    hidden] the model's hidden states at all of them.
    """
    heads, rows, _ = ahead.shape
    wanted = lm_head.logits(states[1:]).softmax(-1)
    losses, gradients = [], torch.empty_like(ahead)
    for head in range(heads):
        logits, goal = lm_head.logits(ahead[head]), wanted[head : head + rows]
        total = logits.logsumexp(-1, keepdim=True)
        losses.append((total.sum(dtype=torch.float64) - (goal * logits).sum(dtype=torch.float64)).float())
        gradients[head] = lm_head.hidden_gradient(logits, (logits - total).exp_().sub_(goal))
    return torch.stack(losses), gradients
