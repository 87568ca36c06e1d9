"""Small kernels of CPUs against their meaning in torch, on odd sizes."""

import pytest
import torch
from torch import Tensor

from pairwise import cover
from quantkit.kernels.cpu import activation, attention, attention_blocks, compiling, greedy, norm, rotary, tape
from quantkit.kernels.reference import attention as reference_attention
from quantkit.kernels.reference import elementwise, sampling

pytestmark = pytest.mark.kernel
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the last bit, at most one apart


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    step = STEP[found.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=step)


@pytest.mark.parametrize(("dtype", "width", "plus_one"), cover(DTYPES, (1, 33, 64, 100), (False, True)))
def test_norm(dtype: torch.dtype, width: int, plus_one: bool) -> None:
    wide, weight = numbers(3, width + 5, dtype=dtype), numbers(width, dtype=dtype)
    x, residual = wide[:, 2 : 2 + width], numbers(3, width, dtype=dtype, seed=1)
    assert_near(
        norm.rms_norm(x, weight, 1e-5, plus_one=plus_one), elementwise.rms_norm(x, weight, 1e-5, plus_one=plus_one)
    )
    other = residual.clone()
    found = norm.add_rms_norm(x, residual, weight, 1e-5, plus_one=plus_one)
    assert_near(found, elementwise.add_rms_norm(x, other, weight, 1e-5, plus_one=plus_one))
    assert torch.equal(residual, other)


@pytest.mark.parametrize(("dtype", "width"), cover(DTYPES, (1, 48, 70)))
def test_activation(dtype: torch.dtype, width: int) -> None:
    gate_up = 8 * numbers(4, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[1, 0] = 200, -200
    assert_near(activation.gated_activation(gate_up, "silu"), elementwise.gated_activation(gate_up, "silu"))
    gelu = activation.gated_activation(gate_up, "gelu_pytorch_tanh")
    assert torch.equal(gelu, elementwise.gated_activation(gate_up, "gelu_pytorch_tanh"))


def test_what_is_no_number_stays_none() -> None:
    x = numbers(2, 32, dtype=torch.bfloat16)
    x[1, 3] = float("nan")
    assert norm.rms_norm(x, x[0], 1e-5).isnan().all(1).tolist() == [False, True]
    assert activation.gated_activation(x, "silu").isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("dtype", "kept", "head_dim", "turned", "normed", "plus_one"),
    cover(DTYPES, DTYPES, (16, 24, 64), (8, 16), (False, True), (False, True)),
)
def test_rotary(
    dtype: torch.dtype, kept: torch.dtype, head_dim: int, turned: int, normed: bool, plus_one: bool
) -> None:
    """The last two tokens have no place in the cache."""
    heads, kv_heads, tokens = 4, 2, 5
    qkv = numbers(tokens, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)[:, 3:]
    positions, slots = torch.tensor([0, 3, 9, 99, -1]), torch.tensor([5, 17, 40, -1, 48])
    cos, sin = numbers(10, turned // 2, dtype=torch.float32), numbers(10, turned // 2, dtype=torch.float32, seed=1)
    norms = {name: numbers(head_dim, dtype=dtype, seed=2) for name in ("q_norm", "k_norm")} if normed else {}
    caches = [[torch.zeros(3, kv_heads, 16, head_dim, dtype=kept) for _ in range(2)] for _ in range(2)]
    found, wanted = (
        op(qkv, positions, cos, sin, slots, *pair, heads, **norms, eps=1e-5, plus_one=plus_one)
        for op, pair in zip((rotary.rotate_and_cache, elementwise.rotate_and_cache), caches, strict=True)
    )
    assert_near(found, wanted)
    for one, other in zip(*caches, strict=True):
        assert_near(one, other)
        assert bool(one.any())


@pytest.mark.parametrize(
    ("dtype", "kept", "heads", "head_dim", "window", "has_sinks"),
    cover(DTYPES, DTYPES, (2, 6), (16, 64), (None, 7), (False, True)),
)
def test_attention(
    dtype: torch.dtype, kept: torch.dtype, heads: int, head_dim: int, window: int | None, has_sinks: bool
) -> None:
    """Of one token, of several, of none, and behind them a row of no sequence."""
    kv_heads, page_size, contexts, new = 2, 16, [1, 40, 9, 33], [1, 3, 0, 1]
    keys, values = (numbers(9, kv_heads, page_size, head_dim, dtype=kept, seed=seed) for seed in (0, 1))
    table = torch.tensor([[4, 0, 0], [7, 2, 5], [1, 0, 0], [8, 3, 6]], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    q = numbers(sum(new) + 1, heads, head_dim, dtype=dtype)
    sinks = numbers(heads, dtype=dtype) if has_sinks else None
    batch = (q, keys, values, table, torch.tensor(contexts, dtype=torch.int32), starts)
    found = attention.attend(*batch, scale=0.3, max_queries=3, window=window, sinks=sinks, soft_cap=None)
    wanted = reference_attention.attend(*batch, scale=0.3, window=window, sinks=sinks)
    assert_near(found, wanted.to(dtype))
    assert not bool(found[-1].any())


@pytest.mark.parametrize(
    ("dtype", "kept", "heads", "head_dim", "window", "has_sinks", "registers"),
    cover(DTYPES, DTYPES, (2, 6, 40), (16, 64, 144), (None, 1, 70), (False, True), [(6, 4), (4, 1), (2, 2), (2, 1)]),
)
def test_attention_of_prompts(
    dtype: torch.dtype,
    kept: torch.dtype,
    heads: int,
    head_dim: int,
    window: int | None,
    has_sinks: bool,
    registers: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the start, behind a prefix, beside answers, with blocks that hold the end of one sequence and the start of
    the next; what lies in pages behind a sequence is not read. With sums as other processors hold them."""
    attention._kernel.cache_clear()
    monkeypatch.setattr(attention_blocks, "_registers", lambda processor: registers)
    monkeypatch.setattr(compiling, "kept_object", lambda name, body, processor, compile: compile())
    kv_heads, page_size, contexts, new = 2, 16, [83, 1, 150, 9, 17], [83, 1, 90, 9, 1]
    keys, values = (numbers(21, kv_heads, page_size, head_dim, dtype=kept, seed=seed) for seed in (0, 1))
    table, free = torch.zeros(5, 10, dtype=torch.int32), iter(torch.randperm(21).tolist())
    for row, context in enumerate(contexts):
        for page in range(-(-context // page_size)):
            table[row, page] = next(free)
        inside = (context - 1) % page_size + 1
        keys[table[row, page], :, inside:], values[table[row, page], :, inside:] = float("nan"), float("nan")
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    q = numbers(sum(new) + 1, heads, head_dim, dtype=dtype)
    sinks = numbers(heads, dtype=dtype) if has_sinks else None
    batch = (q, keys, values, table, torch.tensor(contexts, dtype=torch.int32), starts)
    found = attention.attend(*batch, scale=0.2, max_queries=90, window=window, sinks=sinks)
    clean = (q, keys.nan_to_num(0.0), values.nan_to_num(0.0), *batch[3:])
    wanted = reference_attention.attend(*clean, scale=0.2, window=window, sinks=sinks)
    assert_near(found, wanted.to(dtype))
    assert not bool(found[-1].any())
    attention._kernel.cache_clear()


def test_caps_and_many_heads_are_left_to_torch() -> None:
    keys, values = (numbers(2, 1, 16, 16, dtype=torch.float32, seed=seed) for seed in (0, 1))
    q, table = numbers(12, 70, 16, dtype=torch.float32), torch.tensor([[1]], dtype=torch.int32)
    batch = (q, keys, values, table, torch.tensor([14], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32))
    few = (q[:, :2].contiguous(), *batch[1:])
    for given, options in ((batch, {"soft_cap": None}), (few, {"soft_cap": 5.0})):
        found = attention.attend(*given, scale=0.3, max_queries=12, **options)
        assert torch.equal(found, reference_attention.attend(*given, scale=0.3, **options))


@pytest.mark.parametrize(("dtype", "vocab"), cover(DTYPES, (1, 16, 100, 1000)))
def test_greedy(dtype: torch.dtype, vocab: int) -> None:
    """The first of equals, in any lane; rows of nothing but -Inf, and with what is no number or too large for one."""
    logits = numbers(7, 2 * vocab, dtype=dtype)[:, :vocab]
    logits[1, vocab // 2 :] = 9.0
    logits[2] = 1.0
    logits[3] = -float("inf")
    logits[4, vocab - 1], logits[5, 0] = float("nan"), float("inf")
    tokens, logprobs = greedy.greedy(logits)
    wanted, chances = sampling.greedy(logits)
    assert torch.equal(tokens, wanted)
    assert tokens[4:6].tolist() == [-1, -1]
    torch.testing.assert_close(logprobs, chances, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_tape_runs_kernels_again() -> None:
    """On what is then in the tensors that it reads, and with more than one thread or one piece."""
    x, weight = numbers(5, 40, dtype=torch.bfloat16), numbers(40, dtype=torch.bfloat16)

    def step() -> Tensor:
        normal = norm.rms_norm(x, weight, 1e-5)
        return norm.rms_norm(activation.gated_activation(normal, "silu")[:, 4:], weight[4:20], 1e-5)

    first, taped = tape.record(step)
    assert taped is not None
    assert torch.equal(first, step())
    x.copy_(numbers(5, 40, dtype=torch.bfloat16, seed=9))
    assert torch.equal(taped.run(), step())
    assert torch.equal(taped.run(), taped.result)


def test_no_tape_of_what_torch_computes() -> None:
    x, weight = numbers(5, 40, dtype=torch.bfloat16), numbers(40, dtype=torch.bfloat16)
    for step in (lambda: norm.rms_norm(x, weight, 1e-5) + 1, lambda: norm.rms_norm(x.add_(1), weight, 1e-5)):
        result, taped = tape.record(step)
        assert taped is None
        assert result.shape == x.shape
