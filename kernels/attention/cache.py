"""The paged key-value cache that the attention kernels read: its layout and its limits.

Layout   keys and values, each [pages, kv_heads, page_size, head_dim], contiguous: the rows of one head in one page are
         one contiguous run, so that a kernel copies them with wide loads
         page_table int32 [sequences, max_pages]: token t of sequence s lies in page page_table[s, t // page_size], in
         slot t % page_size; entries past the context (and in front of a sliding window) are never read
         a cache of integers has its codes here, int8 or (half as many) uint8, with the words behind those of a page and
         head: `integer_codes.py`
Limits   head_dim 64, 96, 128 or 256; page_size a power of two, 16 or more; bfloat16, float16, float8_e4m3fn, integers

A cache in float8_e4m3fn holds value / scale with one float32 scale per KV head, for keys and for values: k_scale,
v_scale [kv_heads]. Those of a cache of integers are its words, [pages, kv_heads, page_size].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.integer_codes import BY_DTYPE, IntegerCodes
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_limit, check_shape

HEAD_DIMS = (64, 96, 128, 256)
SMALLEST_PAGE = 16
LARGEST_GROUP = 64  # query heads per KV head
EIGHT_BIT = torch.float8_e4m3fn


@dataclass(frozen=True)
class CacheLayout:
    """The shape of the cache of one layer."""

    pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    head_stride: int | None = None  # elements from one head of a page to the next; None: they touch
    head_words: int = 0  # words from one head of a page to the next, where it has any

    def __post_init__(self) -> None:
        check_limit("attention", "head_dim", self.head_dim, HEAD_DIMS)
        if self.page_size < SMALLEST_PAGE or self.page_size & (self.page_size - 1):
            raise InputError(
                f"attention: page_size is {self.page_size}, but must be a power of two, {SMALLEST_PAGE} or more"
            )
        if self.dtype not in (*HALVES, EIGHT_BIT, *BY_DTYPE):
            raise InputError(
                f"attention: the cache is {str(self.dtype)[6:]}, but must be bfloat16, float16, float8_e4m3fn, int8 or "
                "uint8"
            )

    @property
    def codes(self) -> IntegerCodes | None:
        """None: it has numbers."""
        return BY_DTYPE.get(self.dtype)

    @property
    def row(self) -> int:
        """Elements of one token and head."""
        return self.head_dim if self.codes is None else self.codes.row_bytes(self.head_dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.pages, self.kv_heads, self.page_size, self.row

    @property
    def stride(self) -> int:
        """Elements from one head of a page to the next."""
        return self.page_size * self.row if self.head_stride is None else self.head_stride

    @property
    def padded_dim(self) -> int:
        """head_dim as the kernels hold it, a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def padded_row(self) -> int:
        """Elements of one token and head as the kernels hold them."""
        return self.padded_dim if self.codes is None else self.codes.row_bytes(self.padded_dim)

    @property
    def needs_wide_offsets(self) -> bool:
        """Whether the offset of an element does not fit an int32."""
        return self.pages * self.kv_heads * self.stride >= 2**31

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": self.padded_dim,
            "PAGE": self.page_size,
            "WIDE": self.needs_wide_offsets,
            "BITS": 0 if self.codes is None else self.codes.bits,
            "ROW": self.row,
            "PADDED_ROW": self.padded_row,
            "HEAD_STRIDE": self.stride,
            "HEAD_WORDS": self.head_words,
        }


def layout_of(cache_k: Tensor, cache_v: Tensor, words: Tensor | None = None) -> CacheLayout:
    """The layout of a pair of cache tensors; InputError where it is not one that the kernels read.

    `words` are those of keys, in a cache of integers.
    """
    check_shape("attention", "cache_k", cache_k, (None, None, None, None))
    check_shape("attention", "cache_v", cache_v, tuple(cache_k.shape))
    check_dtype("attention", "cache_v", cache_v, (cache_k.dtype,))
    pages, kv_heads, page_size, row = cache_k.shape
    codes = BY_DTYPE.get(cache_k.dtype)
    if codes is None:
        check_contiguous("attention", "cache_k", cache_k)
        check_contiguous("attention", "cache_v", cache_v)
        return CacheLayout(pages, kv_heads, page_size, row, cache_k.dtype)
    for name, cache in (("cache_k", cache_k), ("cache_v", cache_v)):
        _check_gaps(name, cache, (row, 1), _head_stride(cache_k))
    head_words = 0 if words is None else _head_stride(words)
    head_dim = row * 8 // codes.bits
    return CacheLayout(pages, kv_heads, page_size, head_dim, cache_k.dtype, _head_stride(cache_k), head_words)


def check_words(name: str, words: Tensor, layout: CacheLayout) -> None:
    """Of keys or values in a cache of integers."""
    assert layout.codes is not None
    check_dtype("attention", name, words, (layout.codes.word,))
    check_shape("attention", name, words, layout.shape[:3])
    _check_gaps(name, words, (1,), layout.head_words)


def _head_stride(plane: Tensor) -> int:
    """From one head of a page to the next; torch gives a dimension of one any stride."""
    return plane.stride(1) if plane.shape[1] > 1 else plane.stride(0)


def _check_gaps(name: str, tensor: Tensor, inner: tuple[int, ...], head_stride: int) -> None:
    """Contiguous, but that there may be something between one head of a page and the next."""
    strides = (tensor.shape[1] * head_stride, head_stride, *inner)
    counted = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if any(size > 1 and stride != expected for size, stride, expected in counted):
        raise InputError(
            f"attention: {name} must be a plane of the pages of a cache, but its strides are {tensor.stride()}; "
            "take it from IntegerCodes.planes"
        )
