"""How many tokens a step gives: the tree laid over answers that the model gave without any guessing.

Greedy answers are the same with and without guesses, so nothing has to be generated again: at every token of an answer
the heads guess, and the guesses are compared with what the model did say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.medusa.loss import LmHead
from quantkit.medusa.states import Trace
from quantkit.runtime.drafters.medusa_heads import MedusaHeads
from quantkit.runtime.drafters.medusa_tree import Tree, chain

RANKS = 16  # of each head that are looked at; no tree of 15 nodes uses more
_ROWS = 256  # whose logits are in memory at once


@dataclass(frozen=True, eq=False)
class Guesses:
    """Of one answer: which rank of each head was right, at every token that begins a step."""

    ranks: Tensor  # int64 [heads, positions]; RANKS: none of those looked at, or behind the answer's end
    counted: Tensor  # bool [heads, positions]: whether there was a token to guess


@dataclass(frozen=True)
class TokensPerStep:
    """1 is decoding without guesses."""

    tree: float  # mean over all positions of 1 + accepted guesses
    tree_walk: float  # tokens over steps when each step begins where the one before ended: what serving sees
    chain: float  # the same two, for the favourites of the heads only
    chain_walk: float
    positions: int
    answers: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def guess(heads: MedusaHeads, lm_head: LmHead, embedding: Tensor, traces: Sequence[Trace]) -> list[Guesses]:
    """What heads say at every answered token that at least one answered token follows."""
    found = [_guess_one(heads, lm_head, embedding, one) for one in traces if len(one.tokens) >= max(one.known, 1) + 2]
    if not found:
        raise InputError("no answer has three tokens or more, so nothing can be measured; use another text")
    return found


def _guess_one(heads: MedusaHeads, lm_head: LmHead, embedding: Tensor, one: Trace) -> Guesses:
    """A step that begins at position p knows the token there, and the state at p-1 that it was sampled from."""
    first, last = max(one.known, 1), len(one.tokens) - 1  # steps begin at first .. last-1
    positions = torch.arange(first, last)
    ranks = torch.full((heads.count, len(positions)), RANKS)
    counted = torch.zeros(heads.count, len(positions), dtype=torch.bool)
    for part in positions.split(_ROWS):
        h = one.states[part - 1].to(embedding.device, heads.keep.dtype)
        ahead = heads.hidden(h, embedding[one.tokens[part].to(embedding.device)].to(h.dtype))
        for head in range(heads.count):
            wanted = part + 1 + head
            inside = wanted <= last
            best = lm_head.logits(ahead[head]).topk(RANKS, dim=-1).indices.cpu()
            right = best == one.tokens[wanted.clamp(max=last)][:, None]
            rank = torch.where(right.any(1) & inside, right.int().argmax(1), RANKS)
            ranks[head, part - first], counted[head, part - first] = rank, inside
    return Guesses(ranks, counted)


def accuracies(guesses: Sequence[Guesses]) -> list[list[float]]:
    """How often each rank of each head is right, [heads][RANKS]."""
    ranks, counted = (torch.cat([getattr(one, name) for one in guesses], 1) for name in ("ranks", "counted"))
    total = counted.sum(1).clamp(min=1)
    return [[float((ranks[head] == rank).sum() / total[head]) for rank in range(RANKS)] for head in range(len(ranks))]


def tokens_per_step(guesses: Sequence[Guesses], tree: Tree) -> TokensPerStep:
    """For a tree, and for the chain of all heads."""
    heads = guesses[0].ranks.shape[0]
    accepted, in_chain = ([_accepted(answer, one) for answer in guesses] for one in (tree, chain(heads)))
    return TokensPerStep(
        *_both_means(accepted), *_both_means(in_chain), positions=sum(map(len, accepted)), answers=len(guesses)
    )


def _both_means(accepted: list[list[int]]) -> tuple[float, float]:
    """Over all positions, and over those where steps begin."""
    positions = sum(map(len, accepted))
    return 1 + sum(map(sum, accepted)) / positions, positions / sum(map(_steps, accepted))


def _accepted(answer: Guesses, tree: Tree) -> list[int]:
    """Guesses accepted in a step that begins at each position."""
    paths = set(tree.paths)
    found = []
    for column in answer.ranks.T.tolist():
        depth = 0
        while depth < len(column) and tuple(column[: depth + 1]) in paths:
            depth += 1
        found.append(depth)
    return found


def _steps(accepted: Sequence[int]) -> int:
    position = steps = 0
    while position < len(accepted):
        position += 1 + accepted[position]
        steps += 1
    return steps
