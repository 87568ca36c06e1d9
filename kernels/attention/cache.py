"""The paged key-value cache that the attention kernels read: its layout and its limits.

Layout   keys and values, each [pages, kv_heads, page_size, head_dim], contiguous: the rows of one head in one page are
         one contiguous run, so that a kernel copies them with wide loads
         page_table int32 [sequences, max_pages]: token t of sequence s lies in page page_table[s, t // page_size], in
         slot t % page_size; entries past the context (and in front of a sliding window) are never read
Limits   head_dim 64, 96, 128 or 256; page_size a power of two, 16 or more; bfloat16, float16 or float8_e4m3fn

An 8-bit cache holds value / scale with one float32 scale per KV head, for keys and for values: k_scale, v_scale
[kv_heads].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
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

    def __post_init__(self) -> None:
        check_limit("attention", "head_dim", self.head_dim, HEAD_DIMS)
        if self.page_size < SMALLEST_PAGE or self.page_size & (self.page_size - 1):
            raise InputError(
                f"attention: page_size is {self.page_size}, but must be a power of two, {SMALLEST_PAGE} or more"
            )
        if self.dtype not in (*HALVES, EIGHT_BIT):
            raise InputError(
                f"attention: the cache is {str(self.dtype)[6:]}, but must be bfloat16, float16 or float8_e4m3fn"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.pages, self.kv_heads, self.page_size, self.head_dim

    @property
    def padded_dim(self) -> int:
        """head_dim as the kernels hold it, a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def needs_wide_offsets(self) -> bool:
        """Whether the offset of an element does not fit an int32."""
        return self.pages * self.kv_heads * self.page_size * self.head_dim >= 2**31

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": self.padded_dim,
            "PAGE": self.page_size,
            "WIDE": self.needs_wide_offsets,
        }


def layout_of(cache_k: Tensor, cache_v: Tensor) -> CacheLayout:
    """The layout of a pair of cache tensors; InputError where it is not one that the kernels read."""
    check_shape("attention", "cache_k", cache_k, (None, None, None, None))
    check_shape("attention", "cache_v", cache_v, tuple(cache_k.shape))
    check_dtype("attention", "cache_v", cache_v, (cache_k.dtype,))
    check_contiguous("attention", "cache_k", cache_k)
    check_contiguous("attention", "cache_v", cache_v)
    pages, kv_heads, page_size, head_dim = cache_k.shape
    return CacheLayout(pages, kv_heads, page_size, head_dim, cache_k.dtype)
