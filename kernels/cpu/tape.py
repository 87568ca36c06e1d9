"""Kernels of a CPU that follow each other, to run again in one call: what a graph is on a GPU.

`record` runs a function once and lists the kernels that it runs, with their arguments. To run them again gives the same
as the function as long as it does nothing else: tensors that it allocates are kept, and views of them are nothing to
run. Where it computes with torch, there is no tape. Numbers that change must be written into the tensors that it reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.kernels.cpu.pool import Launch, Pool, shared_pool

_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::zeros", "aten::new_zeros", "aten::empty_strided")


class Tape:
    """`result` is what the function returned, and has the new values after each `run`."""

    def __init__(self, pool: Pool, launches: list[Launch], kept: list[Any], result: Tensor) -> None:
        self.result = result
        self._pool, self._launches, self._kept = pool, launches, kept
        numbers = [
            number
            for launch in launches
            for number in (launch.kernel, ctypes.addressof(launch.arguments), launch.pieces)
        ]
        self._numbers = (ctypes.c_int64 * len(numbers))(*numbers)

    def run(self) -> Tensor:
        self._pool.replay(ctypes.addressof(self._numbers), len(self._launches))
        return self.result


def record(function: Callable[[], Tensor]) -> tuple[Tensor, Tape | None]:
    """What the function returns, and its tape; None where it does more than to run kernels."""
    pool, watch = shared_pool(), _Watch()
    with pool.recording() as launches, watch:
        result = function()
    return result, None if watch.computes else Tape(pool, launches, watch.kept, result)


class _Watch(TorchDispatchMode):
    """Keeps what torch allocates, and sees whether it computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []
        self.computes = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled by torch here, and to skip its compiler loads it and Triton: 0.1 GB, and a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        schema = func._schema
        writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
        is_view = not writes and any(returned.alias_info is not None for returned in schema.returns)
        self.computes |= not (is_view or schema.name in _ALLOCATES)
        return result
