"""One wording for arguments that a kernel cannot take. Launchers call these before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.errors import InputError

HALVES = (torch.bfloat16, torch.float16)


def check_dtype(kernel: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype)[6:] for dtype in allowed)
        raise InputError(f"{kernel}: {name} is {str(tensor.dtype)[6:]}, but must be {names}")


def check_shape(kernel: str, name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """None stands for any size."""
    fits = tensor.ndim == len(expected) and all(
        want is None or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise InputError(f"{kernel}: {name} has shape {list(tensor.shape)}, but must be [{wanted}]")


def check_same_device(kernel: str, **placed: Tensor | torch.device | None) -> None:
    """Tensors, or devices of things that are no tensors."""
    devices = {
        name: thing.device if isinstance(thing, Tensor) else thing
        for name, thing in placed.items()
        if thing is not None
    }
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InputError(f"{kernel}: all tensors must be on one device, but {where}")


def check_rows(kernel: str, name: str, tensor: Tensor) -> None:
    """The last dimension must be contiguous; others may have any stride."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(
            f"{kernel}: the last dimension of {name} must be contiguous, but its strides are {tensor.stride()}; "
            "call .contiguous() first"
        )


def check_contiguous(kernel: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InputError(
            f"{kernel}: {name} must be contiguous, but its strides are {tensor.stride()}; call .contiguous() first"
        )


def check_limit(kernel: str, what: str, value: int, allowed: Sequence[int]) -> None:
    if value not in allowed:
        raise InputError(f"{kernel}: {what} is {value}, but must be one of {', '.join(map(str, allowed))}")
