"""Tokens of an accepted path move inside the cache: bit by bit, all at once, and into what a chain would have left."""

import pytest
import torch
from torch import Tensor

from quantkit.kernels.reference import attention
from quantkit.runtime.device.keep_path import keep_path

LAYERS, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM = 3, 5, 2, 4, 8
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
MOVES = {
    "apart": ([3, 9, 14], [0, 1, 2]),
    "over each other": ([5, 6, 8, 11], [4, 5, 6, 7]),
    "away from each other": ([4, 5, 6, 7], [5, 6, 8, 11]),
    "in a circle": ([3, 4, 17, 0], [4, 17, 0, 3]),
    "to where they are": ([4, 6], [4, 6]),
    "a single one": ([19], [0]),
    "none": ([], []),
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def random_pages(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Random bytes: infinities and NaN must travel, too."""
    shape = (LAYERS, 2, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM * dtype.itemsize)
    drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return drawn.view(dtype).to(device)


def kv_slots(numbers: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def moved_one_by_one(pages: Tensor, sources: list[int], targets: list[int]) -> Tensor:
    before, after = pages.view(torch.uint8), pages.view(torch.uint8).clone()
    for source, target in zip(sources, targets, strict=True):
        value = before[:, :, source // PAGE_SIZE, :, source % PAGE_SIZE]
        after[:, :, target // PAGE_SIZE, :, target % PAGE_SIZE] = value
    return after


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves_these_and_nothing_else(name: str, dtype: torch.dtype, device: str) -> None:
    sources, targets = MOVES[name]
    pages = random_pages(dtype, device)
    expected = moved_one_by_one(pages, sources, targets)
    keep_path([pages], kv_slots(sources, device), kv_slots(targets, device))
    assert torch.equal(pages.view(torch.uint8), expected)


def test_a_cache_that_is_not_contiguous_is_not_copied_in_vain() -> None:
    pages = random_pages(torch.float16).transpose(3, 4)
    with pytest.raises(RuntimeError, match="view"):
        keep_path([pages], kv_slots([1]), kv_slots([0]))


def test_the_kept_path_is_what_a_chain_would_have_left() -> None:
    """Nodes 0, 2 and 5 of a tree behind 6 old tokens are accepted; the next token sees them as if nothing else was."""
    generator = torch.Generator().manual_seed(1)
    pages = torch.randn(LAYERS, 2, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, generator=generator)
    table, old, path = [4, 1, 3, 2], 6, [0, 2, 5]
    where = [table[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE for token in range(len(table) * PAGE_SIZE)]
    tree = kv_slots([0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101])
    q = torch.randn(len(tree), 2 * KV_HEADS, HEAD_DIM, generator=generator)

    def attend(layer: int, q: Tensor, context: int, ancestors: Tensor | None = None) -> Tensor:
        numbers = [torch.tensor(one, dtype=torch.int32) for one in ([table], [context], [0, len(q)])]
        return attention.attend(q, *pages[layer], *numbers, scale=0.3, ancestors=ancestors, dtype=torch.float64)

    before = [attend(layer, q, old + len(tree), tree)[path] for layer in range(LAYERS)]
    sources, targets = [where[old + node] for node in path], where[old : old + len(path)]
    keep_path([pages], kv_slots(sources), kv_slots(targets))
    for layer in range(LAYERS):
        assert torch.allclose(attend(layer, q[path], old + len(path)), before[layer], rtol=1e-12, atol=0.0)


@pytest.mark.gpu
def test_graph_replays_with_other_slots() -> None:
    pages = random_pages(torch.bfloat16, "cuda")
    untouched, sources, targets = pages.clone(), kv_slots([1, 2], "cuda"), kv_slots([3, 4], "cuda")
    keep_path([pages], sources, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep_path([pages], sources, targets)
    for move in (([9, 10], [8, 9]), ([0, 19], [19, 0])):
        pages.copy_(untouched)
        sources.copy_(kv_slots(move[0]))
        targets.copy_(kv_slots(move[1]))
        graph.replay()
        assert torch.equal(pages.view(torch.uint8), moved_one_by_one(untouched, *move))
