"""Leave for kernels that keep a table in shared memory of their own, beside what Triton hands out.

A kernel gets more than 48 KB of shared memory only when the driver is told so. Triton tells it when what it hands out
itself is more, and does not know about tables that PTX declares (`assembly.pair_table`). So the driver is told here, as
soon as such a kernel is loaded.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import triton
from triton.runtime import driver

from quantkit.errors import InputError

_STATIC_BYTES, _MOST_DYNAMIC_BYTES = 1, 8  # CUfunction_attribute of the driver's interface
_PREFER_SHARED = 1  # CUfunc_cache, as Triton sets it for large kernels
_KERNELS: set[str] = set()


def allow_tables(kernel: str) -> None:
    """Lets the kernel of this name have tables, from its next load on."""
    _KERNELS.add(kernel)
    triton.knobs.runtime.kernel_load_end_hook.add(_after_load)


def _after_load(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
    if name not in _KERNELS:
        return
    held = ctypes.c_int()
    _ask("cuFuncGetAttribute", ctypes.byref(held), _STATIC_BYTES, ctypes.c_void_p(function))
    if held.value:
        device = driver.active.get_current_device()
        most = driver.active.utils.get_device_properties(device)["max_shared_mem"]
        _ask("cuFuncSetCacheConfig", ctypes.c_void_p(function), _PREFER_SHARED)
        _ask("cuFuncSetAttribute", ctypes.c_void_p(function), _MOST_DYNAMIC_BYTES, most - held.value)


def _ask(call: str, *arguments: Any) -> None:
    status = getattr(_driver(), call)(*arguments)
    if status:
        raise InputError(f"the CUDA driver refuses {call} (error {status}) for a kernel with a table in shared memory")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
