"""Keys of kernels in Triton's cache that are the same in every process.

Triton makes the key of a function when it is first asked for, of its source, the keys of the functions that it calls,
and the constants of modules that it and they use. Of a called function it takes those constants before it makes that
one's key, which finds them: so the key of a kernel depends on whether another kernel, with which it shares a function,
was launched before (Triton 3.7.1, `DependenciesFinder._update_hash`). A process that launches in another order than the
one before then finds half of the kernels not compiled. Here every function gets its key after those that it calls.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton

_PACKAGE = "quantkit.kernels"
_NO_KERNELS = ("cpu", "reference", "compiling")  # rooms without a function of Triton's


def settle_keys() -> int:
    """Imports every kernel for GPUs and makes its key; how many there are. Call it before the first launch."""
    done: set[int] = set()
    if triton.knobs.runtime.interpret:  # functions have no keys then
        return 0
    for module in kernel_modules():
        for function in list(vars(module).values()):
            if _has_key(function):
                _settle(function, done)
    return len(done)


def kernel_modules() -> Iterator[ModuleType]:
    """In the order of their names."""
    top = Path(__file__).parents[1]
    for file in sorted(top.rglob("*.py")):
        parts = file.relative_to(top).with_suffix("").parts
        if parts[0] not in _NO_KERNELS and not (len(parts) > 1 and parts[1] == "cpu"):
            yield importlib.import_module(".".join((_PACKAGE, *parts)))


def _has_key(value: Any) -> bool:
    return hasattr(type(value), "cache_key")


def _settle(function: Any, done: set[int]) -> None:
    if id(function) in done:
        return
    done.add(id(function))
    for called in _called(function):
        _settle(called, done)
    function.cache_key  # noqa: B018  (Triton keeps it)


def _called(function: Any) -> Iterator[Any]:
    """Functions of Triton's that the names in its code may mean: `f`, and `f` of any module, as in `tl.f`."""
    names, scope = function.fn.__code__.co_names, function.fn.__globals__
    for name in names:
        if _has_key(scope.get(name)):
            yield scope[name]
    for module in (scope[name] for name in names if isinstance(scope.get(name), ModuleType)):
        for name in names:
            found = getattr(module, name, None) if module.__name__ in sys.modules else None
            if _has_key(found):
                yield found
