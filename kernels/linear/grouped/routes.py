"""Which pairs of a token and an expert there are, and how they are shared out: what routed matmuls go by.

A pair has a number, `token * per_token + slot`; the slots of a token are its experts in ascending order.

    chosen   int32 [tokens, per_token]   experts of a token, ascending
    weights  [tokens, per_token]         how much each of them counts, in the dtype of the logits
    own      the experts of this rank, neighbours; the plane of a weight holds one, and planes count from its first

**Listed**: `order` has all pairs by expert, those of one expert by token, and a tile is up to `tile` neighbours there
that share an expert. So kernels gather rows of x through `order`, and what an expert computes lies side by side in
memory. It begins with the pairs of a rank's own experts, and has nothing after them.

    order    int32 [pairs]
    tiles    int32 [3, most]             plane, first place in `order`, end of the expert's places; plane -1: no tile

There is a place for as many tiles as so many pairs could need at most, whatever the router says: launches depend on
nothing but the number of tokens, as CUDA graphs want it.

**Not listed**, for few pairs: there is a program for every pair, or for every expert where these are fewer. It looks
for all pairs of its expert in `chosen`, and takes them a tile at a time; of several pairs the first one's program does.
Nothing is written between a router's choice and the products, and results lie under the numbers of their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

MOST_UNLISTED = 128  # pairs that every program looks through: 16 tokens of 8 experts. 256 cost more than their list
_MOST_COMPARED = 8192  # pairs times places of a tile


@dataclass(frozen=True)
class Rule:
    """How many experts a token has and how they are chosen: the fields of `stages.Routing`."""

    per_token: int
    normalized: bool = True
    scoring: str = "softmax"
    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Routes:
    chosen: Tensor
    weights: Tensor
    own: range
    tile: int  # pairs, at most
    order: Tensor | None = None
    tiles: Tensor | None = None

    @property
    def per_token(self) -> int:
        return self.chosen.shape[1]

    @property
    def pairs(self) -> int:
        return self.chosen.numel()

    @property
    def most(self) -> int:
        """Tiles that there is a place for; without a list, programs that look for their pairs."""
        return min(self.pairs, len(self.own)) if self.tiles is None else self.tiles.shape[1]

    @property
    def unlisted(self) -> Routes:
        return replace(self, order=None, tiles=None)


def can_stay_unlisted(tokens: int, per_token: int, tile: int, splits: int) -> bool:
    """Whether programs that share their inputs `splits` ways find their pairs themselves. Those that take several tiles
    one after the other share nothing."""
    pairs = tokens * per_token
    return pairs <= MOST_UNLISTED and pairs * tile <= _MOST_COMPARED and (splits == 1 or tokens <= tile)


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """That `pairs` can need: every expert has begun one, and each full tile more takes `tile` pairs."""
    return pairs if pairs <= experts else experts + (pairs - experts) // tile
