"""Which pairs of a token and an expert there are, sorted by expert and cut into tiles: what routed matmuls go by.

A pair has a number, `token * per_token + slot`; the slots of a token are its experts in ascending order. `order` lists
all pairs by expert, those of one expert by token, and a tile is up to `tile` neighbours there that share an expert. So
kernels gather rows of x through `order`, and what an expert computes lies side by side in memory.

    chosen   int32 [tokens, per_token]   experts of a token, ascending
    weights  [tokens, per_token]         how much each of them counts, in the dtype of the logits
    order    int32 [pairs]
    tiles    int32 [3, most]             plane, first place in `order`, end of the expert's places; plane -1: no tile

The plane of a weight holds one expert; planes count from the first expert that this rank has, where ranks divide them.
`order` then begins with the pairs of its own, and has nothing after them.

There is a place for as many tiles as so many pairs could need at most, whatever the router says: launches depend on
nothing but the number of tokens, as CUDA graphs want it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
    order: Tensor
    tiles: Tensor
    tile: int  # pairs, at most

    @property
    def per_token(self) -> int:
        return self.chosen.shape[1]

    @property
    def pairs(self) -> int:
        return self.order.shape[0]

    @property
    def most(self) -> int:
        """Tiles that there is a place for."""
        return self.tiles.shape[1]


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """That `pairs` can need: every expert has begun one, and each full tile more takes `tile` pairs."""
    return pairs if pairs <= experts else experts + (pairs - experts) // tile
