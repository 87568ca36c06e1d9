"""Which guesses to verify in one step: the tree of candidates that most often holds what the model will say.

A node is a path of ranks: (0,) is the favourite of the first head, (0, 2) the third choice of the second behind it.
Heads guess without seeing each other, so a path's chance is taken as the product of how often its ranks are right.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quantkit.errors import InputError

MOST_NODES = 15  # with the token they follow, 16 rows of one sequence in a step
Path = tuple[int, ...]  # ranks, from the first head on
Accuracies = Sequence[Sequence[float]]  # [head][rank]: how often this rank of this head is right


class Node(NamedTuple):
    """One guess."""

    head: int  # from 0; this is also how deep it stands
    rank: int  # among the head's guesses, from 0, the most probable


@dataclass(frozen=True)
class Tree:
    """Guesses, the most valuable first: the first k nodes are the best tree of k nodes, and parents precede children.

    The root, the last known token, is no node.
    """

    parents: tuple[int, ...]  # node behind which each one stands; -1: behind the root
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.nodes) <= MOST_NODES or len(self.parents) != len(self.nodes):
            raise InputError(f"a tree needs 1 to {MOST_NODES} nodes, and a parent for each")
        seen = set()
        for index, (parent, node) in enumerate(zip(self.parents, self.nodes, strict=True)):
            depth = 0 if parent == -1 else self.nodes[parent].head + 1 if 0 <= parent < index else -1
            if node.head != depth or node.rank < 0 or (parent, node.rank) in seen:
                raise InputError(f"node {index} of a tree (behind {parent}, {node}) has no place in it")
            seen.add((parent, node.rank))

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def depth(self) -> int:
        """Most guesses that one step can accept."""
        return max(node.head for node in self.nodes) + 1

    @property
    def width(self) -> int:
        """How many guesses of a head are used at most."""
        return max(node.rank for node in self.nodes) + 1

    @property
    def paths(self) -> list[Path]:
        found: list[Path] = []
        for parent, node in zip(self.parents, self.nodes, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), node.rank))
        return found

    def to_dict(self) -> dict[str, list[int]]:
        return {
            "parents": list(self.parents),
            "heads": [node.head for node in self.nodes],
            "ranks": [node.rank for node in self.nodes],
        }

    @classmethod
    def from_dict(cls, given: Any) -> Tree:
        """From what a file says; InputError for anything that is no tree."""
        lists = [given.get(name) for name in ("parents", "heads", "ranks")] if isinstance(given, dict) else [None]
        if not all(isinstance(values, list) and all(type(value) is int for value in values) for values in lists):
            raise InputError("a tree is an object with lists of whole numbers: parents, heads, ranks")
        parents, heads, ranks = (tuple(values or ()) for values in lists)
        if len(heads) != len(ranks):
            raise InputError(f"a tree has {len(heads)} heads, but {len(ranks)} ranks; each node has one of each")
        return cls(parents, tuple(map(Node, heads, ranks)))

    @classmethod
    def from_paths(cls, paths: Sequence[Path]) -> Tree:
        """In the order given; InputError where a path comes before its parent."""
        index: dict[Path, int] = {(): -1}
        for path in paths:
            if not path or path[:-1] not in index:
                raise InputError(f"the path {path} of a tree has no parent before it")
            index[path] = len(index) - 1
        parents = tuple(index[path[:-1]] for path in paths)
        return cls(parents, tuple(Node(len(path) - 1, path[-1]) for path in paths))


def chain(length: int) -> Tree:
    """The favourite of each head behind that of the head before: no branches."""
    return Tree.from_paths([(0,) * depth for depth in range(1, length + 1)])


def choose_tree(accuracies: Accuracies, nodes: int) -> Tree:
    """The tree of so many nodes with the most accepted guesses to expect; smaller where heads and ranks run out.

    Greedy is exact: no node is worth more than its parent, so the most valuable nodes are a tree by themselves. Ranks
    are tried in the order of their accuracy, which chance may make another than that of the ranks.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise InputError(f"a tree of {nodes} nodes; choose 1 to {MOST_NODES}")
    if not accuracies or not all(len(row) for row in accuracies):
        raise InputError("a tree needs the accuracy of at least one head, and of one rank of each head")
    orders = [_best_first(row) for row in accuracies]
    chosen: list[Path] = []
    waiting = [_candidate(accuracies, orders, (0,))]
    while waiting and len(chosen) < nodes:
        places = heapq.heappop(waiting)[2]
        chosen.append(_ranks(orders, places))
        if places[-1] + 1 < len(orders[len(places) - 1]):
            heapq.heappush(waiting, _candidate(accuracies, orders, (*places[:-1], places[-1] + 1)))
        if len(places) < len(orders):
            heapq.heappush(waiting, _candidate(accuracies, orders, (*places, 0)))
    return Tree.from_paths(chosen)


def expected_tokens(accuracies: Accuracies, tree: Tree) -> float:
    """Tokens a step if heads were right independently of each other: one, and the chance of every node."""
    return 1 + sum(_value(accuracies, path) for path in tree.paths)


def _best_first(row: Sequence[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda rank: (-row[rank], rank))


def _candidate(accuracies: Accuracies, orders: list[list[int]], places: Path) -> tuple[float, int, Path]:
    """Sorts by value, then shallow nodes first, then better ranks."""
    return -_value(accuracies, _ranks(orders, places)), len(places), places


def _ranks(orders: list[list[int]], places: Path) -> Path:
    """Places in the order of accuracy -> ranks."""
    return tuple(order[place] for order, place in zip(orders, places, strict=False))


def _value(accuracies: Accuracies, path: Path) -> float:
    return math.prod(accuracies[head][rank] for head, rank in enumerate(path))
