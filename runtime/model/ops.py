"""The operations of the decoder and the sampler: Triton kernels on a GPU, on a CPU kernels that LLVM compiles for the
smallest and most frequent, and their meaning in plain torch for all others.

All sets take the same arguments, so that the model is written once. Linear layers choose for themselves
(`kernels/linear/op.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.card import runs_kernels
from quantkit.kernels.cpu.installed import can_compile

Op = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    """See the kernels of these names."""

    rms_norm: Op
    add_rms_norm: Op
    gated_activation: Op
    embed: Op
    rotate_and_cache: Op
    attend: Op
    rotate_latent: Op
    attend_latents: Op
    attend_expanded: Op | None  # None: latents are never expanded
    greedy: Op
    sample: Op


def ops_for(device: torch.device, dtype: torch.dtype) -> Ops:
    """The set for a device. A GPU computes in 16 bit."""
    if not runs_kernels(device):
        return _compiled() if can_compile() else _plain()
    if dtype not in (torch.bfloat16, torch.float16):
        raise InputError(f"dtype {str(dtype)[6:]} runs on a CPU only; on a GPU use bfloat16 or float16")
    return _triton()


def import_ahead(device: torch.device) -> Callable[[], None]:
    """Begins to import kernels and to make their keys, beside whatever comes next. Call what it gives before the first
    launch: it waits for that."""
    return _importing().join if device.type == "cuda" else lambda: None


@cache
def _importing() -> threading.Thread:
    thread = threading.Thread(target=_import_kernels, daemon=True)
    thread.start()
    return thread


def _import_kernels() -> None:
    from quantkit.kernels.compiling.keys import settle_keys

    settle_keys()


def _plain() -> Ops:
    from quantkit.kernels.reference import attention, elementwise, latent, sampling

    def attend(q: Tensor, *cache_and_batch: Tensor, max_queries: int, scratch: None = None, **options: Any) -> Tensor:
        return attention.attend(q, *cache_and_batch, **options).to(q.dtype)

    def attend_latents(*tensors: Tensor, max_queries: int, scratch: None = None, **options: Any) -> Tensor:
        return latent.attend_latents(*tensors, **options)

    return Ops(
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        gated_activation=elementwise.gated_activation,
        embed=elementwise.embed,
        rotate_and_cache=elementwise.rotate_and_cache,
        attend=attend,
        rotate_latent=latent.rotate_latent,
        attend_latents=attend_latents,
        attend_expanded=None,
        greedy=sampling.greedy,
        sample=sampling.sample,
    )


def _compiled() -> Ops:
    from quantkit.kernels.cpu.activation import gated_activation
    from quantkit.kernels.cpu.attention import attend
    from quantkit.kernels.cpu.greedy import greedy
    from quantkit.kernels.cpu.norm import add_rms_norm, rms_norm
    from quantkit.kernels.cpu.rotary import rotate_and_cache

    return replace(
        _plain(),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        gated_activation=gated_activation,
        rotate_and_cache=rotate_and_cache,
        attend=attend,
        greedy=greedy,
    )


def _triton() -> Ops:
    from quantkit.kernels.activation import gated_activation
    from quantkit.kernels.attention.attend import attend
    from quantkit.kernels.attention.latent.attend import attend_latents
    from quantkit.kernels.attention.latent.expanded import attend_expanded
    from quantkit.kernels.attention.latent.rotate import rotate_latent
    from quantkit.kernels.embedding import embed
    from quantkit.kernels.norm import add_rms_norm, rms_norm
    from quantkit.kernels.rotary import rotate_and_cache
    from quantkit.kernels.sampling.greedy import greedy
    from quantkit.kernels.sampling.sample import sample

    return Ops(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        gated_activation=gated_activation,
        embed=embed,
        rotate_and_cache=rotate_and_cache,
        attend=attend,
        rotate_latent=rotate_latent,
        attend_latents=attend_latents,
        attend_expanded=attend_expanded,
        greedy=greedy,
        sample=sample,
    )
