"""Caches of integers: how many bytes a token takes, and how a page holds them.

Layout   pages are uint8 [..., page_size, token_bytes]. The bytes of one KV head in one page are two planes: the codes
         of all its tokens, then their words
           int8   codes int8 [page_size, head_dim],        words float32 [page_size]
           int4   codes uint8 [page_size, head_dim / 2],   words int64 [page_size]
Meaning  `reference.integer_codes`
           int8   value = code * word
           int4   byte j holds the codes of elements j (its low four bits) and head_dim / 2 + j. Each half of a head has
                  a scale and a middle, float16: value = (code - 8) * scale + middle, of the four ranges in CUTS
                  that with the least squared error. From its lowest bits up, a word
                  holds scale and middle of the first half, then those of the second. Keys are rotated before they are
                  rounded, and queries with them, which leaves their products as they are

A page is copied as it is: nothing about it is kept elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SCALE = 255.0  # kernels multiply weights by 256 times a value's scale in float16; what is larger saturates
CUTS = ((0.0, 0.0), (0.025, 0.0), (0.0, 0.025), (0.025, 0.025))  # shares of a range of 4 bits that its ends may lose:
# as min-max has them, the extremes are exact and all others pay for it
SMALLEST_SCALE = 2.0**-18  # of 4 bits, where float16 still has some digits


@dataclass(frozen=True)
class IntegerCodes:
    """One kind of integer cache."""

    name: str  # of --kv-dtype
    bits: int
    dtype: torch.dtype  # of codes as kernels get them, which tells them the kind
    word: torch.dtype  # of what says what they mean

    def row_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def token_bytes(self, head_dim: int) -> int:
        """Of one head of a token's keys, or of its values."""
        return self.row_bytes(head_dim) + self.word.itemsize

    def planes(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of pages [..., page_size, token_bytes]: codes [..., page_size, row_bytes], words [..., page_size]."""
        page_size, width = pages.shape[-2:]
        codes = page_size * (width - self.word.itemsize)
        raw = pages.flatten(-2)
        rows = raw[..., :codes].unflatten(-1, (page_size, width - self.word.itemsize))
        return rows.view(self.dtype), raw[..., codes:].view(self.word)


INT8 = IntegerCodes("int8", 8, torch.int8, torch.float32)
INT4 = IntegerCodes("int4", 4, torch.uint8, torch.int64)
BY_NAME = {codes.name: codes for codes in (INT8, INT4)}
BY_DTYPE = {codes.dtype: codes for codes in (INT8, INT4)}
