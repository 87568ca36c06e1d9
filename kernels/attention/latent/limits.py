"""What the kernels of latent attention take."""

from __future__ import annotations

from quantkit.errors import InputError
from quantkit.kernels.attention.cache import SMALLEST_PAGE

LARGEST_RANK, LARGEST_ROPE = 512, 64
LARGEST_HEAD = 256  # numbers of a head's key that do not turn, and of its value


def check_latents(name: str, rank: int, rope: int, page_size: int) -> None:
    """A cache of latents and their keys."""
    if not 0 < rank <= LARGEST_RANK or not 0 < rope <= LARGEST_ROPE or rope % 2:
        raise InputError(
            f"{name}: a token has {rank} + {rope} numbers, but a latent has 1 to {LARGEST_RANK} and its key an even "
            f"number up to {LARGEST_ROPE}"
        )
    if page_size < SMALLEST_PAGE or page_size & (page_size - 1):
        raise InputError(f"{name}: page_size is {page_size}, but must be a power of two, {SMALLEST_PAGE} or more")


def check_heads(name: str, plain: int, value: int) -> None:
    for what, size in (("keys", plain), ("values", value)):
        if not 0 < size <= LARGEST_HEAD:
            raise InputError(f"{name}: heads have {what} of {size} numbers, but 1 to {LARGEST_HEAD} are supported")
