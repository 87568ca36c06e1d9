"""Pages of the key-value cache, as everybody knows them: the one that belongs to nobody, and what names contents."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

PADDING_PAGE = 0  # padding reads and writes it
Digest = bytes


def page_digest(before: Digest, tokens: Sequence[int]) -> Digest:
    """Of a full page's tokens and, through `before`, of all tokens in front of it; b"" at the beginning."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
