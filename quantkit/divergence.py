"""What quality is measured by at every token: a model's loss, and the KL divergence between two models' predictions.

Both look at logits in pieces, small enough for large vocabularies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantkit.errors import QuantkitError

CHUNK_VALUES = 1 << 24  # logits looked at together: 64 MB in float32, a vocabulary may have 256 thousand entries


def pieces(logits: Tensor) -> tuple[Tensor, ...]:
    """Logits [positions, vocabulary], a few positions at a time."""
    found: tuple[Tensor, ...] = logits.split(max(1, CHUNK_VALUES // logits.shape[-1]))
    return found


def perplexity_of(nats: float) -> float:
    """Of a mean loss of tokens; also the ratio of two perplexities, of the difference of their losses."""
    try:
        return math.exp(nats)
    except OverflowError:
        message = f"a token costs {nats:,.0f} nats, a perplexity beyond every number; the weights must be broken"
        raise QuantkitError(message) from None


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of every target [positions] in nats, float64, from logits [positions, vocabulary]."""
    rows = pieces(logits)
    chunks = zip(rows, targets.split(len(rows[0])), strict=True)
    found = [torch.nn.functional.cross_entropy(part.float(), wanted, reduction="none") for part, wanted in chunks]
    return torch.cat(found).double()


def token_divergence(base_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(base || model) at every position, float64 [positions], from two logits [positions, vocabulary]."""
    chunks = zip(pieces(base_logits), pieces(logits), strict=True)
    return torch.cat([_divergence(base, other) for base, other in chunks])


def _divergence(base_logits: Tensor, logits: Tensor) -> Tensor:
    base = base_logits.float().log_softmax(-1)
    terms = base.exp() * (base - logits.float().log_softmax(-1))
    terms.masked_fill_(base.isneginf(), 0)  # 0 * log 0: a token that the base excludes adds nothing
    return terms.sum(-1, dtype=torch.float64)
