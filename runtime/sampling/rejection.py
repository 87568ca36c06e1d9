"""Guesses that were drawn from a distribution q, accepted so that the tokens have the distribution p of the target.

A guess x is taken with probability min(1, p(x) / q(x)); else a token is drawn from what p has more than q, that is
max(p - q, 0) made a distribution (Leviathan et al., 2023). No other rule that keeps p takes more guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels.reference.sampling import allowed


@dataclass(frozen=True)
class Proposed:
    """Guesses, and the logits that each was drawn from with the parameters of its request."""

    logits_rows: Tensor  # int64 [guesses], whose successor is guessed
    guesses: Tensor  # int64 [guesses]
    logits: Tensor  # [guesses, vocab]


def verify(
    logits: Tensor,
    proposed: Proposed,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    random: torch.Generator,
) -> Tensor:
    """The guess where it is accepted, a token that is not the guess elsewhere; int64 [guesses].

    `logits` [guesses, vocab] are the target's for the same rows, the parameters those of each row.
    """
    settings = (temperature, top_k, top_p, min_p)
    p, q = probabilities(logits, *settings), probabilities(proposed.logits, *settings)
    guess = proposed.guesses[:, None].clamp(min=0)  # a draft whose logits were not finite guesses NO_TOKEN
    chance, residual = torch.rand(2, len(guess), generator=random, device=logits.device, dtype=torch.float64)
    accepted = chance * q.gather(1, guess)[:, 0] < p.gather(1, guess)[:, 0]
    upto = (p - q).clamp(min=0).cumsum(-1)
    drawn = torch.searchsorted(upto, (residual * upto[:, -1])[:, None], right=True)[:, 0]
    return torch.where(accepted | (upto[:, -1] <= 0), guess[:, 0], drawn.clamp(max=logits.shape[1] - 1))


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What a request draws from, float64 [rows, vocab]."""
    stays = allowed(logits, temperature, top_k, top_p, min_p)
    scaled = logits.double() / temperature.clamp(min=1e-6)[:, None].double()
    return scaled.masked_fill(~stays, float("-inf")).softmax(-1)
