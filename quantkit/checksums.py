"""Checksums of tensors: whether what a file gives back is what was handed over, without keeping it."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_PIECE, _THREADS = 8 << 20, 8  # bytes hashed by one thread at a time, and how many there are


def checksum(tensor: Tensor) -> str:
    """SHA-256 of the dtype, the shape and the hashes of the bytes' pieces, so that threads can share a large tensor."""
    pieces = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).split(_PIECE)
    whole = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if len(pieces) == 1:
        whole.update(_hash(pieces[0]))
    else:
        with ThreadPoolExecutor(_THREADS) as threads:
            whole.update(b"".join(threads.map(_hash, pieces)))
    return whole.hexdigest()


def _hash(piece: Tensor) -> bytes:
    return hashlib.sha256(piece.numpy().data).digest()
