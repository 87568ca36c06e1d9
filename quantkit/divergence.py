"""KL divergence between two models' predictions, in pieces small enough for large vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_VALUES = 1 << 24  # logits looked at together: 64 MB in float32, a vocabulary may have 256 thousand entries


def token_divergence(base_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(base || model) at every position, float64 [positions], from two logits [positions, vocabulary]."""
    rows = max(1, CHUNK_VALUES // base_logits.shape[-1])
    chunks = zip(base_logits.split(rows), logits.split(rows), strict=True)
    return torch.cat([_divergence(base, other) for base, other in chunks])


def _divergence(base_logits: Tensor, logits: Tensor) -> Tensor:
    base = base_logits.float().log_softmax(-1)
    terms = base.exp() * (base - logits.float().log_softmax(-1))
    terms.masked_fill_(base.isneginf(), 0)  # 0 * log 0: a token that the base excludes adds nothing
    return terms.sum(-1, dtype=torch.float64)
