"""Kinds of KV cache: what `kv_dtype` names, and the bytes of a token in each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.errors import InputError
from quantkit.kernels.attention.integer_codes import BY_NAME, IntegerCodes

_FLOATS = {"auto": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
KV_DTYPES = (*_FLOATS, *BY_NAME)


@dataclass(frozen=True)
class KvKind:
    """One kind of cache."""

    dtype: torch.dtype  # of its tensor: uint8 where that holds codes
    codes: IntegerCodes | None = None

    @property
    def label(self) -> str:
        return str(self.dtype)[6:] if self.codes is None else self.codes.name

    def token_bytes(self, width: int) -> int:
        """Of `width` numbers: a head of a token's keys, or of its values, or a latent."""
        return width * self.dtype.itemsize if self.codes is None else self.codes.token_bytes(width)

    def entry_width(self, width: int) -> int:
        """Elements of its tensor for as many numbers."""
        return self.token_bytes(width) // self.dtype.itemsize


def kv_kind(name: str, activations: torch.dtype) -> KvKind:
    """What `kv_dtype` means for a model with activations of this dtype."""
    if name in BY_NAME:
        return KvKind(torch.uint8, BY_NAME[name])
    return KvKind(_FLOATS[name] or activations)


def check_kv_dtype(name: str, entry: tuple[int, int, int]) -> None:
    """Refuses integers for what has no heads of keys and values: `entry` is `ModelConfig.cache_entry`."""
    kinds, _, width = entry
    if name in BY_NAME and kinds == 1:
        raise InputError(
            f"kv_dtype is {name}, but this model keeps latents instead of keys and values; use --kv-dtype auto or fp8"
        )
    if name in BY_NAME and width % 2:
        raise InputError(f"kv_dtype is {name}, but heads have {width} elements, an odd number; use --kv-dtype auto")
