"""The choice of a tree against every tree there is, and what is no tree."""

import itertools

import pytest

from quantkit.errors import InputError
from quantkit.runtime.drafters.medusa_tree import MOST_NODES, Node, Path, Tree, chain, choose_tree, expected_tokens

ACCURACIES = [
    [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]],
    [[0.9, 0.05, 0.01], [0.8, 0.1, 0.02]],
    [[0.3, 0.35, 0.1], [0.2, 0.25, 0.5]],  # later ranks are right more often
    [[0.6, 0.3], [0.5, 0.2], [0.7, 0.1]],
    [[0.0, 0.0], [0.0, 0.0]],
]


def every_path(accuracies: list[list[float]]) -> list[Path]:
    ranks = [range(len(row)) for row in accuracies]
    return [path for depth in range(1, len(ranks) + 1) for path in itertools.product(*ranks[:depth])]


def best_value(accuracies: list[list[float]], nodes: int) -> float:
    """Of all sets of paths that hold the parents of their paths."""
    found = []
    for paths in itertools.combinations(every_path(accuracies), nodes):
        if all(len(path) == 1 or path[:-1] in paths for path in paths):
            found.append(expected_tokens(accuracies, Tree.from_paths(paths)))
    return max(found)


@pytest.mark.parametrize("accuracies", ACCURACIES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_no_tree_is_better(accuracies: list[list[float]], nodes: int) -> None:
    chosen = choose_tree(accuracies, nodes)
    assert len(chosen) == nodes
    assert expected_tokens(accuracies, chosen) == pytest.approx(best_value(accuracies, nodes), abs=1e-12)


@pytest.mark.parametrize("accuracies", ACCURACIES)
def test_the_first_nodes_are_the_smaller_tree(accuracies: list[list[float]]) -> None:
    whole = choose_tree(accuracies, 8)
    for nodes in range(1, 8):
        assert choose_tree(accuracies, nodes).paths == whole.paths[:nodes]


def test_a_tree_that_can_be_checked_by_eye() -> None:
    tree = choose_tree([[0.5, 0.3], [0.5, 0.1]], 4)
    assert tree.paths == [(0,), (1,), (0, 0), (1, 0)]
    assert tree.parents == (-1, -1, 0, 1)
    assert tree.nodes == (Node(0, 0), Node(0, 1), Node(1, 0), Node(1, 0))
    assert (tree.depth, tree.width) == (2, 2)
    assert expected_tokens([[0.5, 0.3], [0.5, 0.1]], tree) == pytest.approx(1 + 0.5 + 0.3 + 0.25 + 0.15)


def test_few_ranks_make_a_small_tree() -> None:
    assert choose_tree([[0.5], [0.4]], MOST_NODES).paths == chain(2).paths == [(0,), (0, 0)]


@pytest.mark.parametrize("nodes", [0, -1, MOST_NODES + 1])
def test_sizes_that_cannot_be_verified_are_refused(nodes: int) -> None:
    with pytest.raises(InputError, match=f"choose 1 to {MOST_NODES}"):
        choose_tree([[0.5] * 20], nodes)


def test_nothing_to_choose_from_is_refused() -> None:
    for accuracies in ([], [[]], [[0.5], []]):
        with pytest.raises(InputError, match="at least one head"):
            choose_tree(accuracies, 3)


def test_a_file_gives_the_tree_back() -> None:
    tree = choose_tree(ACCURACIES[0], 7)
    assert Tree.from_dict(tree.to_dict()) == tree


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {"parents": [-1], "heads": [0]},
        {"parents": [-1], "heads": [0], "ranks": ["0"]},
        {"parents": [-1], "heads": [0], "ranks": [True]},
        {"parents": [-1, -1], "heads": [0, 0], "ranks": [0]},
        {"parents": [-1], "heads": [0, 0], "ranks": [0, 1]},
        {"parents": [], "heads": [], "ranks": []},
        {"parents": [0], "heads": [1], "ranks": [0]},  # behind itself
        {"parents": [1, -1], "heads": [1, 0], "ranks": [0, 0]},  # a child before its parent
        {"parents": [-1, 0], "heads": [0, 2], "ranks": [0, 0]},  # leaves out a head
        {"parents": [-1, -1], "heads": [0, 0], "ranks": [3, 3]},  # the same guess twice
        {"parents": [-1], "heads": [0], "ranks": [-1]},
        {"parents": [-1] * 16, "heads": [0] * 16, "ranks": list(range(16))},
    ],
)
def test_what_is_no_tree_is_refused(given: object) -> None:
    with pytest.raises(InputError, match="tree"):
        Tree.from_dict(given)


def test_a_path_needs_its_parent_first() -> None:
    for paths in ([(0, 0)], [(1,), (0, 0), (0,)], [()]):
        with pytest.raises(InputError, match="no parent before it"):
            Tree.from_paths(paths)
