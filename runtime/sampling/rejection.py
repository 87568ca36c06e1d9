"""Guesses that were drawn from a distribution q, accepted so that the tokens have the distribution p of the target.

A guess x is taken with probability min(1, p(x) / q(x)); else a token is drawn from what p has more than q, that is
max(p - q, 0) made a distribution (Leviathan et al., 2023). No other rule that keeps p takes more guesses.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels.reference.sampling import allowed

VERIFIED_BYTES = 256 << 20  # that verification takes at a time
_OF_A_LOGIT = 64  # bytes: two distributions in float64, and what sorts them


@dataclass(frozen=True)
class Proposed:
    """Guesses, and the logits that each was drawn from with the parameters of its request."""

    logits_rows: list[int]  # ascending, whose successor is guessed
    guesses: Tensor  # int64 [guesses]
    logits: list[Tensor]  # [vocab] of each guess

    def within(self, start: int, stop: int) -> Proposed:
        """Those whose logits rows are in this range, as if it were all there is."""
        at = slice(bisect_left(self.logits_rows, start), bisect_left(self.logits_rows, stop))
        return Proposed([row - start for row in self.logits_rows[at]], self.guesses[at], self.logits[at])


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

    `logits` [rows, vocab] are the target's, the parameters those of each row.
    """
    count, vocab = len(proposed.logits_rows), logits.shape[1]
    at = torch.tensor(proposed.logits_rows).to(logits.device, non_blocking=True)
    numbers = torch.rand(2, count, generator=random, device=logits.device, dtype=torch.float64)
    few = max(1, VERIFIED_BYTES // (vocab * _OF_A_LOGIT))
    found = []
    for start in range(0, count, few):
        part, rows = slice(start, start + few), at[start : start + few]
        settings = (temperature[rows], top_k[rows], top_p[rows], min_p[rows])
        p = probabilities(logits[rows], *settings)
        q = probabilities(torch.stack(proposed.logits[part]), *settings)
        found.append(_accepted_or_drawn(p, q, proposed.guesses[part], numbers[:, part]))
    return torch.cat(found)


def _accepted_or_drawn(p: Tensor, q: Tensor, guesses: Tensor, numbers: Tensor) -> Tensor:
    guess = guesses[:, None].clamp(min=0)  # a draft whose logits were not finite guesses NO_TOKEN
    chance, residual = numbers
    accepted = chance * q.gather(1, guess)[:, 0] < p.gather(1, guess)[:, 0]
    upto = (p - q).clamp(min=0).cumsum(-1)
    drawn = torch.searchsorted(upto, (residual * upto[:, -1])[:, None], right=True)[:, 0]
    return torch.where(accepted | (upto[:, -1] <= 0), guess[:, 0], drawn.clamp(max=p.shape[1] - 1))


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What a request draws from, float64 [rows, vocab]."""
    stays = allowed(logits, temperature, top_k, top_p, min_p)
    scaled = logits.double() / temperature.clamp(min=1e-6)[:, None].double()
    return scaled.masked_fill(~stays, float("-inf")).softmax(-1)
