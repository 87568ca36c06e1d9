"""Paged attention of a few new tokens: against its meaning in torch, how it divides contexts, what it refuses."""

from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.kernels.attention.attend import Plan, attend, make_scratch, plan
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.decode_plan import (
    INTEGERS_TRIED,
    DecodeConfig,
    choose_splits,
    decode_config,
    scratch_needs,
)
from quantkit.kernels.attention.integer_codes import BY_NAME
from quantkit.kernels.reference import attention as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

pytestmark = pytest.mark.kernel

SMALL = DecodeConfig(block_n=32, num_warps=4, num_stages=2, programs_per_sm=2)
FP8 = torch.float8_e4m3fn


def dtypes(device: str) -> list[torch.dtype]:
    """The interpreter rounds bfloat16 towards zero, so its errors say nothing."""
    return [torch.float16, torch.bfloat16] if device == "cuda" else [torch.float16]


def check(batch: Batch, launches: int | None = None, **overrides: Any) -> None:
    """Near the exact result, no worse than twice torch in the same dtype, the same bits in every launch, tickets back
    at zero. By default two launches on a GPU; the interpreter runs programs one by one."""
    q, keys = batch.tensors[0], batch.tensors[1]
    scratch = make_scratch(
        q.device, sequences=64, heads=q.shape[1], kv_heads=keys.shape[1], head_dim=q.shape[2], max_queries=64,
        config=DecodeConfig(32, 4, 2, 64),
    )  # fmt: skip
    first, *others = (
        attend(*batch.tensors, **batch.options, max_queries=batch.max_queries, scratch=scratch, **overrides)
        for _ in range(launches or (2 if q.is_cuda else 1))
    )
    assert all(torch.equal(other, first) for other in others)
    assert not scratch.tickets.any()
    exact = reference.attend(*batch.tensors, **batch.options, dtype=torch.float64)
    rough = reference.attend(*batch.tensors, **batch.options, dtype=q.dtype)
    error = relative_error(first, exact)
    assert error < LARGEST_ERROR[str(q.dtype)[6:]]
    assert error <= 2 * relative_error(rough, exact)


CASES: dict[str, dict[str, Any]] = {
    "three sequences, ends inside a page": {"contexts": [100, 17, 33], "new": [1, 1, 1]},
    "a single token": {"contexts": [1], "new": [1]},
    "whole pages": {"contexts": [16, 64], "new": [1, 1]},
    "padding": {"contexts": [40, 0, 50, 0], "new": [1, 0, 1, 0]},
    "padding with a context": {"contexts": [40, 33], "new": [0, 1]},
    "group 1": {"contexts": [70, 9], "new": [1, 1], "group": 1, "kv_heads": 3},
    "group 7": {"contexts": [70], "new": [1], "group": 7, "kv_heads": 1},
    "group 8": {"contexts": [70], "new": [1], "group": 8, "kv_heads": 1},
    "group 32": {"contexts": [70], "new": [1], "group": 32, "kv_heads": 1},
    "dim 96": {"contexts": [70, 20], "new": [1, 1], "head_dim": 96, "kv_heads": 1},
    "dim 128": {"contexts": [70, 20], "new": [1, 1], "head_dim": 128, "kv_heads": 1},
    "dim 256": {"contexts": [70, 20], "new": [1, 1], "head_dim": 256, "kv_heads": 1},
    "pages of 32": {"contexts": [100, 32], "new": [1, 1], "page_size": 32, "kv_heads": 1},
    "pages of 128": {"contexts": [300, 128], "new": [1, 1], "page_size": 128, "kv_heads": 1},
    "window": {"contexts": [100, 17], "new": [1, 1], "window": 20, "kv_heads": 1},
    "window of one": {"contexts": [100, 17], "new": [1, 1], "window": 1, "kv_heads": 1},
    "window on large pages": {"contexts": [300, 17], "new": [1, 1], "window": 100, "page_size": 128, "kv_heads": 1},
    "soft cap": {"contexts": [100, 17], "new": [1, 1], "soft_cap": 2.0, "kv_heads": 1},
    "verification": {"contexts": [100, 3, 33], "new": [3, 3, 3], "kv_heads": 1},
    "uneven verification": {"contexts": [100, 5, 33], "new": [4, 5, 1], "kv_heads": 1, "window": 20},
    "64 rows": {"contexts": [60], "new": [8], "group": 8, "kv_heads": 1},
    "fp8": {"contexts": [100, 17], "new": [1, 1], "cache_dtype": FP8},
    "sinks": {"contexts": [100, 17, 1], "new": [1, 1, 1], "sinks": True},
    "sinks, verification, window": {"contexts": [100, 5], "new": [4, 5], "kv_heads": 1, "sinks": True, "window": 20},
    "sinks, fp8, soft cap": {"contexts": [100], "new": [1], "cache_dtype": FP8, "soft_cap": 5.0, "sinks": True},
    "fp8, soft cap": {"contexts": [100, 17], "new": [1, 1], "cache_dtype": FP8, "soft_cap": 5.0},
}
INTEGERS: dict[str, dict[str, Any]] = {
    "ends inside a page": {"contexts": [100, 17, 33], "new": [1, 1, 1]},
    "padding": {"contexts": [40, 0, 50, 0], "new": [1, 0, 1, 0]},
    "group 7": {"contexts": [70], "new": [1], "group": 7, "kv_heads": 1},
    "dim 96": {"contexts": [70, 20], "new": [1, 1], "head_dim": 96, "kv_heads": 3, "group": 1},
    "dim 128, pages of 128": {"contexts": [300, 20], "new": [1, 1], "head_dim": 128, "page_size": 128},
    "dim 256": {"contexts": [70, 20], "new": [1, 1], "head_dim": 256, "kv_heads": 1},
    "verification, window, sinks": {"contexts": [100, 5], "new": [4, 5], "window": 20, "sinks": True},
    "soft cap, 64 rows": {"contexts": [60], "new": [8], "group": 8, "kv_heads": 1, "soft_cap": 5.0},
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, device: str) -> None:
    for dtype in dtypes(device):
        check(random_batch(**CASES[name], dtype=dtype, device=device))


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("name", INTEGERS)
def test_caches_of_integers(name: str, kind: str, device: str) -> None:
    for dtype in dtypes(device):
        check(random_batch(**INTEGERS[name], dtype=dtype, cache_dtype=BY_NAME[kind].dtype, device=device))


@pytest.mark.parametrize("kind", BY_NAME)
def test_splits_over_integers(kind: str, device: str) -> None:
    batch = random_batch([200, 17], [1, 1], head_dim=96, cache_dtype=BY_NAME[kind].dtype, device=device)
    check(batch, splits=3, decode=SMALL)


TOKENS_AS_ROWS: dict[str, dict[str, Any]] = {
    "ends inside a page": {"contexts": [100, 17, 33]},
    "padding": {"contexts": [40, 0, 50, 1], "new": [1, 0, 1, 1]},
    "group 7": {"contexts": [70], "group": 7, "kv_heads": 1},
    "group 8, sinks": {"contexts": [70, 1], "group": 8, "kv_heads": 1, "sinks": True},
    "dim 96": {"contexts": [70, 20], "head_dim": 96, "kv_heads": 3, "group": 1},
    "dim 256, soft cap": {"contexts": [70, 20], "head_dim": 256, "kv_heads": 1, "soft_cap": 5.0},
    "pages of 128, window": {"contexts": [300, 20], "page_size": 128, "window": 100},
}


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("name", TOKENS_AS_ROWS)
def test_tokens_as_rows(name: str, kind: str, device: str) -> None:
    case = {"head_dim": 128, **TOKENS_AS_ROWS[name]}
    new = case.pop("new", [1] * len(case["contexts"]))
    for dtype in dtypes(device):
        batch = random_batch(**case, new=new, dtype=dtype, cache_dtype=BY_NAME[kind].dtype, device=device)
        check(batch, decode=INTEGERS_TRIED[0])


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("way", INTEGERS_TRIED, ids=str)
def test_splits_of_tokens_as_rows(way: DecodeConfig, kind: str, device: str) -> None:
    batch = random_batch([300, 17], [1, 1], head_dim=128, kv_heads=1, cache_dtype=BY_NAME[kind].dtype, device=device)
    check(batch, launches=2, splits=3, decode=way)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tokens_as_rows_keep_what_is_not_a_number(bad: float, device: str) -> None:
    batch = random_batch([40, 20], [1, 1], head_dim=128, cache_dtype=torch.int8, device=device)
    batch.tensors[0][0, 3, 5] = bad
    found = attend(*batch.tensors, **batch.options, max_queries=1, decode=INTEGERS_TRIED[0])
    assert found[0, 3].isnan().all()
    assert found.isfinite().sum() == found.numel() - 128


@pytest.mark.parametrize(
    "change", [{"new": [2, 1]}, {"group": 16}, {"cache_dtype": None}, {"head_dim": 64}, {"ancestors": True}]
)
def test_tokens_as_rows_are_for_few_queries_over_integers(change: dict[str, Any], device: str) -> None:
    case = {"new": [1, 1], "head_dim": 128, "cache_dtype": torch.uint8} | change
    batch = random_batch([40, 20], **case, device=device)
    with pytest.raises(InputError, match="tokens as rows are for caches of integers"):
        attend(*batch.tensors, **batch.options, max_queries=batch.max_queries, decode=INTEGERS_TRIED[0])


def test_integers_need_their_words(device: str) -> None:
    batch = random_batch([40], [1], cache_dtype=torch.int8, device=device)
    q, keys, values, *rest = batch.tensors
    with pytest.raises(InputError, match="a cache of int8 needs k_scale and v_scale, its words"):
        attend(q, keys, values, *rest, scale=0.1, max_queries=1)
    with pytest.raises(InputError, match="must be a plane of the pages"):
        attend(q, keys.transpose(0, 1).contiguous().transpose(0, 1), values, *rest, **batch.options, max_queries=1)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 40])
def test_any_number_of_splits(splits: int, device: str) -> None:
    batch = random_batch([200, 17, 64], [1, 1, 1], kv_heads=1, device=device)
    check(batch, launches=2, splits=splits, decode=SMALL)


@pytest.mark.parametrize("splits", [2, 5])
def test_sinks_count_once(splits: int, device: str) -> None:
    batch = random_batch([200, 17, 64], [1, 1, 1], group=3, sinks=True, device=device)
    check(batch, launches=2, splits=splits, decode=SMALL)


def test_splits_within_a_window(device: str) -> None:
    check(random_batch([200, 17], [2, 2], kv_heads=1, window=70, device=device), splits=3, decode=SMALL)


@pytest.mark.parametrize("dtype", [torch.float16, FP8])
@pytest.mark.parametrize("pages", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_hundreds_of_pages(pages: int, dtype: torch.dtype, device: str) -> None:
    check(random_batch([16 * pages, 15], [1, 1], kv_heads=1, group=2, cache_dtype=dtype, device=device))


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("pages", [300, pytest.param(4000, marks=pytest.mark.gpu)])
def test_hundreds_of_pages_with_tokens_as_rows(pages: int, kind: str, device: str) -> None:
    """Offsets of codes add up, and are taken away at the end."""
    contexts, cache = [16 * pages, 15], BY_NAME[kind].dtype
    batch = random_batch(contexts, [1, 1], kv_heads=1, group=2, head_dim=128, cache_dtype=cache, device=device)
    check(batch, splits=1, decode=INTEGERS_TRIED[0])


def test_many_sequences_over_eight_bits(device: str) -> None:
    one_warp = decode_config(128, 1, 4, pairs=2048, processors=132)
    assert one_warp.num_warps == 1
    batch = random_batch([100, 17, 33], [1, 1, 1], head_dim=128, kv_heads=1, cache_dtype=FP8, device=device)
    check(batch, decode=one_warp)


def test_rows_of_no_sequence_stay(device: str) -> None:
    q, *rest = random_batch([40, 20], [1, 1], device=device).tensors
    padded = torch.cat([q, q])
    out = torch.full_like(padded, 7.0)
    attend(padded, *rest, scale=0.1, max_queries=1, out=out)
    assert bool((out[2:] == 7.0).all())
    assert torch.equal(out[:2], attend(q, *rest, scale=0.1, max_queries=1))


def test_empty_batch(device: str) -> None:
    q, keys, values, table, contexts, starts = random_batch([20], [1], device=device).tensors
    none = attend(q[:0], keys, values, table[:0], contexts[:0], starts[:1], scale=0.1, max_queries=1)
    assert none.shape == (0, 8, 64)


def test_strided_queries(device: str) -> None:
    q, *rest = random_batch([40, 20], [1, 1], device=device).tensors
    fused = torch.randn(2, 24, 64, dtype=q.dtype, device=device)  # queries beside keys and values
    fused[:, :8] = q
    assert torch.equal(
        attend(fused[:, :8], *rest, scale=0.1, max_queries=1), attend(q, *rest, scale=0.1, max_queries=1)
    )


def test_offsets_beyond_int32(device: str) -> None:
    batch = random_batch([70, 20], [1, 1], device=device)
    assert CacheLayout(2**22, 8, 16, 128, torch.float16).needs_wide_offsets
    expected = attend(*batch.tensors, **batch.options, max_queries=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheLayout, "needs_wide_offsets", True)
        assert torch.equal(attend(*batch.tensors, **batch.options, max_queries=1), expected)


def test_choose_splits() -> None:
    assert choose_splits(8, 32768, 264, 64) == 33
    assert choose_splits(8, 64, 264, 64) == 1  # one tile
    assert choose_splits(2048, 1024, 264, 64) == 1
    assert choose_splits(1, 10**6, 264, 64) == 128
    assert choose_splits(0, 0, 264, 64) == 1


def test_few_sequences_get_one_program_per_multiprocessor() -> None:
    assert decode_config(128, 2, 4, pairs=64, processors=132) == DecodeConfig(128, 4, 3, 1)
    assert decode_config(128, 2, 4, pairs=256, processors=132) == DecodeConfig(64, 2, 3, 3)


def test_eight_bits_get_programs_of_one_warp_where_no_context_is_divided() -> None:
    chosen = decode_config(128, 1, 4, pairs=528, processors=132)
    assert chosen == DecodeConfig(32, 1, 3, 4)
    assert choose_splits(528, 10**6, 132 * chosen.programs_per_sm, chosen.block_n) == 1
    assert decode_config(128, 1, 4, pairs=527, processors=132).num_warps == 4
    assert decode_config(128, 1, 32, pairs=528, processors=132).num_warps == 4


def test_scratch_needs() -> None:
    assert scratch_needs(8, 3, 4, 128) == {"programs": 24, "rows": 4, "padded_dim": 128, "counters": 8}
    assert scratch_needs(8, 1, 4, 128)["programs"] == 0


def test_plan() -> None:
    assert plan(tokens=5, sequences=5, max_queries=1, group=4) == Plan(4, prefill=False)
    assert plan(tokens=40, sequences=5, max_queries=16, group=4) == Plan(64, prefill=False)
    few = {plan(tokens=40, sequences=5, max_queries=new, group=3).decode_rows for new in range(2, 22)}
    assert few == {16, 32, 64}  # and not one kernel for each count
    assert plan(tokens=200, sequences=2, max_queries=100, group=4) == Plan(0, prefill=True)
    assert plan(tokens=101, sequences=2, max_queries=100, group=4) == Plan(16, prefill=True)
    assert plan(tokens=101, sequences=2, max_queries=100, group=32) == Plan(32, prefill=True)


@pytest.mark.parametrize("padded_dim", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("pairs", [8, 256])
def test_default_tiles_fit_shared_memory(padded_dim: int, itemsize: int, pairs: int) -> None:
    config = decode_config(padded_dim, itemsize, 4, pairs, 132)
    assert 2 * config.block_n * padded_dim * itemsize * config.num_stages <= 200_000


Q, K, V, TABLE, CONTEXTS, STARTS = range(6)
WRONG_TENSORS: list[tuple[int, Any, str]] = [
    (Q, lambda q: q.float(), "q is float32, but must be bfloat16, float16"),
    (Q, lambda q: q[..., :32], "q has shape"),
    (Q, lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "last dimension of q must be contiguous"),
    (Q, lambda q: q[:, :7], "7 query heads over 2 KV heads"),
    (Q, lambda q: q.bfloat16(), "the cache is float16, but must be bfloat16"),
    (K, lambda k: k[:, :, :8].contiguous(), "cache_v has shape"),
    (K, lambda k: k.bfloat16(), "cache_v is float16, but must be bfloat16"),
    (K, lambda k: k.transpose(1, 2).contiguous().transpose(1, 2), "cache_k must be contiguous"),
    (V, lambda v: v.transpose(1, 2).contiguous().transpose(1, 2), "cache_v must be contiguous"),
    (TABLE, lambda table: table.long(), "page_table is int64, but must be int32"),
    (TABLE, lambda table: table[0], "page_table has shape"),
    (TABLE, lambda table: table.t().contiguous().t(), "last dimension of page_table must be contiguous"),
    (CONTEXTS, lambda contexts: contexts.long(), "context_lengths is int64"),
    (CONTEXTS, lambda contexts: contexts[:1], "context_lengths has shape"),
    (STARTS, lambda starts: starts.float(), "query_starts is float32"),
    (STARTS, lambda starts: starts[:2], "query_starts has shape"),
    (STARTS, lambda starts: starts.repeat_interleave(2)[::2], "query_starts must be contiguous"),
]


@pytest.mark.parametrize(("place", "change", "words"), WRONG_TENSORS, ids=[words for _, _, words in WRONG_TENSORS])
def test_wrong_tensors(place: int, change: Any, words: str, device: str) -> None:
    tensors = list(random_batch([40, 20], [1, 1], device=device).tensors)
    tensors[place] = change(tensors[place])
    with pytest.raises(InputError, match=words):
        attend(*tensors, scale=0.1, max_queries=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 0.0}, "scale is 0.0, but must be positive"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"max_queries": 0}, "max_queries is 0"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"sinks": torch.zeros(8, dtype=torch.int32)}, "sinks is int32"),
        ({"k_scale": torch.ones(2)}, "must be given together"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, "k_scale has shape"),
        ({"k_scale": torch.ones(2).double(), "v_scale": torch.ones(2)}, "k_scale is float64"),
        ({"out": torch.empty(2, 8, 64)}, "out is float32"),
        ({"out": torch.empty(3, 8, 64, dtype=torch.float16)}, "out has shape"),
        ({"q_device": "meta"}, "must be on one device"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str, device: str) -> None:
    tensors = list(random_batch([40, 20], [1, 1], device=device).tensors)
    options = {"scale": 0.1, "max_queries": 1} | options
    if options.pop("q_device", None):
        tensors[TABLE] = tensors[TABLE].to("meta")
    with pytest.raises(InputError, match=words):
        attend(*tensors, **options)


def test_eight_bit_cache_needs_scales(device: str) -> None:
    batch = random_batch([40, 20], [1, 1], cache_dtype=FP8, device=device)
    with pytest.raises(InputError, match="needs k_scale and v_scale"):
        attend(*batch.tensors, scale=0.1, max_queries=1)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((2, 2, 16, 80), torch.float16, "head_dim is 80, but must be one of 64, 96, 128, 256"),
        ((2, 2, 8, 64), torch.float16, "page_size is 8, but must be a power of two, 16 or more"),
        ((2, 2, 48, 64), torch.float16, "page_size is 48"),
        ((2, 2, 16, 64), torch.float32, "the cache is float32"),
        ((2, 2, 16, 64), torch.int16, "the cache is int16"),
    ],
)
def test_wrong_caches(shape: tuple[int, ...], dtype: torch.dtype, words: str, device: str) -> None:
    q, _, _, *batch = random_batch([40, 20], [1, 1], device=device).tensors
    cache = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(InputError, match=words):
        attend(q, cache, cache, *batch, scale=0.1, max_queries=1)


def test_scratch_too_small(device: str) -> None:
    batch = random_batch([200], [1], device=device)
    scratch = make_scratch(device, sequences=0, heads=8, kv_heads=2, head_dim=64)
    with pytest.raises(InputError, match="scratch is too small"):
        attend(*batch.tensors, scale=0.1, max_queries=1, scratch=scratch, splits=2)
