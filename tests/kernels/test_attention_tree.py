"""Paged attention of new tokens that form trees: its meaning, the kernel against it, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.attend import attend, make_scratch
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.attention.decode_plan import DecodeConfig
from quantkit.kernels.reference import attention as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

pytestmark = pytest.mark.kernel

SMALL = DecodeConfig(block_n=32, num_warps=4, num_stages=2, programs_per_sm=2)
FP8 = torch.float8_e4m3fn


def dtypes(device: str) -> list[torch.dtype]:
    """The interpreter rounds bfloat16 towards zero, so its errors say nothing."""
    return [torch.float16, torch.bfloat16] if device == "cuda" else [torch.float16]


def chain(count: int) -> list[int]:
    return [2 ** (node + 1) - 1 for node in range(count)]


def run(batch: Batch, **overrides: Any) -> Tensor:
    return attend(*batch.tensors, **batch.options | {"max_queries": batch.max_queries} | overrides)


def check(batch: Batch, launches: int | None = None, **overrides: Any) -> None:
    """Near the exact result, no worse than twice torch in the same dtype, the same bits in every launch, tickets back
    at zero. By default two launches on a GPU; the interpreter runs programs one by one."""
    q, keys = batch.tensors[0], batch.tensors[1]
    scratch = make_scratch(
        q.device, sequences=64, heads=q.shape[1], kv_heads=keys.shape[1], head_dim=q.shape[2], max_queries=64,
        config=DecodeConfig(32, 4, 2, 64),
    )  # fmt: skip
    first, *others = (run(batch, scratch=scratch, **overrides) for _ in range(launches or (2 if q.is_cuda else 1)))
    assert all(torch.equal(other, first) for other in others)
    assert not scratch.tickets.any()
    exact = reference.attend(*batch.tensors, **batch.options, dtype=torch.float64)
    rough = reference.attend(*batch.tensors, **batch.options, dtype=q.dtype)
    error = relative_error(first, exact)
    assert error < LARGEST_ERROR[str(q.dtype)[6:]]
    assert error <= 2 * relative_error(rough, exact)


def naive(batch: Batch) -> Tensor:
    """Token by token, head by head, key by key, in float64."""
    q, keys, values, table, contexts, starts = (tensor.cpu() for tensor in batch.tensors)
    group, page_size = q.shape[1] // keys.shape[1], keys.shape[2]
    cap, tree = batch.options["soft_cap"], batch.options["ancestors"].tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for sequence, context in enumerate(contexts.tolist()):
        begin, end = starts[sequence : sequence + 2].tolist()
        old = context - (end - begin)
        for token in range(begin, end):
            seen = [at for at in range(context) if at < old or tree[token] & 2 ** (at - old)]
            places = [(int(table[sequence, at // page_size]), at % page_size) for at in seen]
            for head in range(q.shape[1]):
                k, v = (
                    torch.stack([cache[page, head // group, slot] for page, slot in places]).double()
                    for cache in (keys, values)
                )
                if "k_scale" in batch.options:
                    k *= batch.options["k_scale"][head // group].item()
                    v *= batch.options["v_scale"][head // group].item()
                scores = k @ q[token, head].double() * batch.options["scale"]
                weights = (scores if cap is None else cap * (scores / cap).tanh()).exp()
                out[token, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"cache_dtype": FP8}], ids=str)
def test_meaning(options: dict[str, Any], device: str) -> None:
    """Several trees, one without old tokens, a single node, padding."""
    batch = random_batch([40, 6, 17, 0, 33], [9, 6, 1, 0, 12], ancestors=True, device=device, **options)
    result = reference.attend(*batch.tensors, **batch.options, dtype=torch.float64)
    assert relative_error(result.cpu(), naive(batch)) < 1e-12


def test_random_trees_are_trees() -> None:
    """Every node sees itself and, besides, nothing or all that the last of its ancestors sees."""
    batch = random_batch([40, 60], [20, 40], ancestors=True)
    entries = batch.options["ancestors"].tolist()
    shapes = set()
    for tree in (entries[:20], entries[20:]):
        for node, bits in enumerate(tree):
            above = bits - 2**node
            assert 0 <= above < 2**node
            assert above == 0 or above == tree[above.bit_length() - 1]
        shapes.add("branches" if tree != chain(len(tree)) else "chain")
        assert any(bits.bit_count() > 2 for bits in tree)
    assert shapes == {"branches"}
    assert "ancestors" not in random_batch([40], [20]).options


CASES: dict[str, dict[str, Any]] = {
    "one tree": {"contexts": [100], "new": [10]},
    "trees of several sizes and a single token": {"contexts": [100, 17, 33, 40], "new": [10, 1, 7, 16]},
    "no old tokens": {"contexts": [9, 1, 16], "new": [9, 1, 16]},
    "padding": {"contexts": [40, 0, 50, 33], "new": [5, 0, 3, 0]},
    "group 1, 62 nodes": {"contexts": [100, 62, 63], "new": [62, 62, 1], "group": 1, "kv_heads": 2},
    "group 3": {"contexts": [70, 20], "new": [21, 5], "group": 3},
    "group 4, 64 rows": {"contexts": [70, 16], "new": [16, 16], "group": 4},
    "group 8": {"contexts": [70, 20], "new": [8, 3], "group": 8},
    "group 64": {"contexts": [70], "new": [1], "group": 64},
    "two KV heads": {"contexts": [70, 20], "new": [7, 3], "kv_heads": 2},
    "dim 96": {"contexts": [70, 20], "new": [7, 3], "head_dim": 96},
    "dim 128": {"contexts": [140, 20], "new": [14, 3], "head_dim": 128},
    "dim 256": {"contexts": [70, 20], "new": [7, 3], "head_dim": 256},
    "pages of 32": {"contexts": [100, 32], "new": [11, 12], "page_size": 32},
    "pages of 128": {"contexts": [300, 128], "new": [11, 12], "page_size": 128},
    "over the edge of a page and a tile": {"contexts": [133, 258, 129], "new": [12, 7, 2]},
    "soft cap": {"contexts": [100, 17], "new": [10, 9], "soft_cap": 2.0},
    "fp8": {"contexts": [100, 17], "new": [10, 9], "cache_dtype": FP8},
    "fp8, soft cap": {"contexts": [100, 17], "new": [10, 9], "cache_dtype": FP8, "soft_cap": 5.0},
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, device: str) -> None:
    for dtype in dtypes(device):
        check(random_batch(**{"kv_heads": 1} | CASES[name], ancestors=True, dtype=dtype, device=device))


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 40])
def test_any_number_of_splits(splits: int, cache_dtype: torch.dtype | None, device: str) -> None:
    """Nodes of the first tree lie in two tiles, from 3 splits on in two splits: some see nothing of the second."""
    batch = random_batch(
        [200, 17, 70, 9], [16, 4, 12, 1], kv_heads=1, cache_dtype=cache_dtype, ancestors=True, device=device
    )
    check(batch, launches=2 if cache_dtype is None else None, splits=splits, decode=SMALL)


def test_a_chain_among_trees(device: str) -> None:
    batch = random_batch([100, 50, 33, 17], [9, 10, 7, 1], kv_heads=1, ancestors=True, device=device)
    batch.options["ancestors"][9:19] = torch.tensor(chain(10))
    check(batch)
    check(batch, splits=3, decode=SMALL)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_chains_are_what_no_ancestors_are(cache_dtype: torch.dtype | None, splits: int | None, device: str) -> None:
    new = [9, 1, 16, 12]
    batch = random_batch([100, 17, 40, 12], new, kv_heads=1, cache_dtype=cache_dtype, soft_cap=5.0, device=device)
    chains = torch.tensor([bits for count in new for bits in chain(count)], device=device)
    how = {"splits": splits, "decode": SMALL}
    assert torch.equal(run(batch, ancestors=chains, **how), run(batch, **how))
    exact = {"dtype": torch.float64, **batch.options}
    assert torch.equal(
        reference.attend(*batch.tensors, ancestors=chains, **exact), reference.attend(*batch.tensors, **exact)
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_every_bit_counts(splits: int, device: str) -> None:
    """A wrong bit changes the rows of its token, and no others; 30 old tokens put the nodes into two tiles."""
    batch = random_batch([42, 20], [12, 3], kv_heads=1, ancestors=True, device=device)
    right = run(batch, splits=splits, decode=SMALL)
    for node, bit in [(0, 1), (0, 11), (3, 0), (5, 2), (7, 7), (8, 1), (11, 0), (11, 10)]:
        wrong = batch.options["ancestors"].clone()
        wrong[node] ^= 2**bit
        result = run(batch, ancestors=wrong, splits=splits, decode=SMALL)
        others = torch.arange(len(right), device=device) != node
        assert relative_error(result[node], right[node]) > 10 * LARGEST_ERROR["float16"], (node, bit)
        assert torch.equal(result[others], right[others])


def test_bits_of_tokens_that_are_not_there(device: str) -> None:
    """They lead nowhere: behind the context lies poison."""
    batch = random_batch([100, 37], [5, 3], kv_heads=1, ancestors=True, device=device)
    more = batch.options["ancestors"].clone()
    more[:5] |= 2**61 - 2**5
    more[5:] |= 2**61 - 2**3
    assert torch.equal(run(batch, ancestors=more), run(batch))


def test_rows_of_no_sequence_stay(device: str) -> None:
    batch = random_batch([40, 20], [4, 3], ancestors=True, device=device)
    q, *rest = batch.tensors
    padded, more = torch.cat([q, q]), batch.options["ancestors"].repeat(2)
    out = torch.full_like(padded, 7.0)
    attend(padded, *rest, **batch.options | {"ancestors": more}, max_queries=4, out=out)
    assert bool((out[7:] == 7.0).all())
    assert torch.equal(out[:7], run(batch))


def test_empty_batch(device: str) -> None:
    q, keys, values, table, contexts, starts = random_batch([20], [1], device=device).tensors
    none = torch.empty(0, dtype=torch.int64, device=device)
    empty = (q[:0], keys, values, table[:0], contexts[:0], starts[:1])
    assert attend(*empty, scale=0.1, max_queries=1, ancestors=none).shape == (0, 8, 64)


@pytest.mark.gpu
def test_graph_replays_with_other_trees() -> None:
    batch = random_batch([300, 70, 33], [12, 5, 1], ancestors=True, device="cuda")
    scratch = make_scratch("cuda", sequences=3, heads=8, kv_heads=2, head_dim=64, max_queries=12)
    run(batch, scratch=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(batch, scratch=scratch)
    results = []
    for seed in (0, 1, 2):
        other = random_batch([300, 70, 33], [12, 5, 1], ancestors=True, device="cuda", seed=seed)
        batch.options["ancestors"].copy_(other.options["ancestors"])
        graph.replay()
        exact = reference.attend(*batch.tensors, **batch.options, dtype=torch.float64)
        assert relative_error(out, exact) < LARGEST_ERROR["float16"]
        results.append(out.clone())
    assert not torch.equal(results[0], results[1])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": 20}, "ancestors cannot be used with a window"),
    "rows": ({"max_queries": 17}, "max_queries is 17, but with ancestors and 4 query heads per KV head .* at most 16"),
    "dtype": ({"ancestors": lambda bits: bits.int()}, "ancestors is int32, but must be int64"),
    "shape": ({"ancestors": lambda bits: bits[1:]}, "ancestors has shape .6., but must be .7."),
    "strides": ({"ancestors": lambda bits: bits.repeat_interleave(2)[::2]}, "ancestors must be contiguous"),
    "device": ({"ancestors": lambda bits: bits.to("meta")}, "must be on one device"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str, device: str) -> None:
    batch = random_batch([40, 20], [4, 3], ancestors=True, device=device)
    change, words = WRONG[name]
    if "ancestors" in change:
        change = {"ancestors": change["ancestors"](batch.options["ancestors"])}
    with pytest.raises(InputError, match=words):
        run(batch, **change)


def test_too_many_nodes(device: str) -> None:
    batch = random_batch([80], [63], group=1, ancestors=True, device=device)
    with pytest.raises(InputError, match=r"max_queries is 63, .* at most 62"):
        run(batch)


def test_the_meaning_has_no_window_either(device: str) -> None:
    batch = random_batch([40], [4], window=20, ancestors=True, device=device)
    with pytest.raises(InputError, match="ancestors cannot be used with a window"):
        reference.attend(*batch.tensors, **batch.options)
