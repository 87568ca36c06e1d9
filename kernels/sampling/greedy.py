"""The largest logit of every request, and its log-probability.

Layout   logits [requests, vocab], rows of any stride
Returns  tokens int64 [requests], the first of equal ones, and their log-probabilities float32 [requests]; token -1 and
         NaN where a logit is NaN or +inf
Meaning  `reference.sampling.greedy`
Limits   logits bfloat16, float16 or float32; -inf bans a token; vocab up to 524,288

Two launches: each program takes a part of a row, then one program a row takes the best part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.sampling import weights

LARGEST_VOCAB = 524288  # twice Gemma 3's; sums of weights would fit 2**24


@triton.jit
def _scan(logits, maxima, places, sums, stride, vocab, splits, PART: tl.constexpr):
    """Largest logit, its first place and the sum of exp below it, of each part of a row."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * PART + tl.arange(0, PART)
    x = tl.load(logits + request * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    place = tl.min(tl.where(x == top, token, vocab - 1), axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = request * splits + split
    tl.store(maxima + at, top)
    tl.store(places + at, place)
    tl.store(sums + at, tl.sum(tl.exp(x - base), axis=0))


@triton.jit
def _choose_largest(maxima, places, sums, tokens, logprobs, tops, logsums, splits, SPLITS: tl.constexpr):
    """The greedy choice; where every token is banned, the first one with -inf, and `tops` and `logsums` stay finite.
    Where a logit is NaN or +inf, so is the sum of a part: -1."""
    request = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    at = request * splits + split
    part = tl.load(maxima + at, mask=split < splits, other=float("-inf"))
    place = tl.load(places + at, mask=split < splits, other=2147483647)
    total = tl.load(sums + at, mask=split < splits, other=0.0)
    top = tl.max(part, axis=0)
    chosen = tl.min(tl.where(part == top, place, 2147483647), axis=0)
    banned = top == float("-inf")  # every token
    top = tl.where(banned, 0.0, top)
    whole = tl.sum(total * tl.exp(part - top), axis=0)
    finite = whole == whole
    logsum = top + tl.log(tl.where(banned & finite, 1.0, whole))
    tl.store(tokens + request, tl.where(finite, chosen, -1).to(tl.int64))
    tl.store(logprobs + request, tl.where(banned & finite, float("-inf"), top - logsum))
    tl.store(tops + request, top)
    tl.store(logsums + request, logsum)


def greedy(logits: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The largest logit's index and log-probability; `out` holds both where they are given."""
    result = check("greedy", logits, out, {})
    if logits.shape[0]:
        choose_largest(logits, result)
    return result


def choose_largest(logits: Tensor, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Writes the result. The largest logit and the log of the sum of exp, float32 [requests]."""
    requests, vocab = logits.shape
    splits = triton.cdiv(vocab, weights.PART)
    # Tensors of their own: halves of one would be aligned or not, and Triton compiles a kernel for either.
    maxima = torch.empty((requests, splits), dtype=torch.float32, device=logits.device)
    sums, places = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    tops = torch.empty(requests, dtype=torch.float32, device=logits.device)
    logsums = torch.empty_like(tops)
    _scan[(requests, splits)](
        logits, maxima, places, sums, logits.stride(0), vocab, splits, PART=weights.PART, num_warps=4
    )
    _choose_largest[(requests,)](
        maxima, places, sums, *result, tops, logsums, splits, SPLITS=triton.next_power_of_2(splits), num_warps=1
    )
    return tops, logsums


def check(
    kernel: str, logits: Tensor, out: tuple[Tensor, Tensor] | None, parameters: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The tensors for the result."""
    check_dtype(kernel, "logits", logits, (*HALVES, torch.float32))
    check_shape(kernel, "logits", logits, (None, None))
    check_rows(kernel, "logits", logits)
    requests, vocab = logits.shape
    if not 1 <= vocab <= LARGEST_VOCAB:
        raise InputError(f"{kernel}: a vocabulary of {vocab} tokens, but must be 1 to {LARGEST_VOCAB}")
    dtypes = {"top_k": torch.int32, "seed": torch.int64, "step": torch.int64}
    for name, tensor in parameters.items():
        check_dtype(kernel, name, tensor, (dtypes.get(name, torch.float32),))
        check_shape(kernel, name, tensor, (requests,))
        check_contiguous(kernel, name, tensor)
    if out is None:
        tokens = torch.empty(requests, dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(requests, dtype=torch.float32, device=logits.device)
    else:
        tokens, logprobs = out
    for name, tensor, dtype in (("tokens", tokens, torch.int64), ("logprobs", logprobs, torch.float32)):
        check_dtype(kernel, name, tensor, (dtype,))
        check_shape(kernel, name, tensor, (requests,))
        check_contiguous(kernel, name, tensor)
    check_same_device(kernel, logits=logits, tokens=tokens, logprobs=logprobs, **parameters)
    return tokens, logprobs
