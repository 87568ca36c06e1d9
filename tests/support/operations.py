"""What a GPU would be asked to do, counted on a CPU: torch operations, and how often the host waits for a number.

with counted() as count:
    work()
print(count.operations.total(), count.waits.total())

Views and empty tensors cost a device nothing and are left out. Work in other threads is not seen.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FREE = {
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "permute",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "split",
    "split_with_sizes",
    "detach",
    "alias",
    "as_strided",
    "unbind",
    "diagonal",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "lift_fresh",
}
_WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "bincount"}


@dataclass
class Count:
    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


class _Operations(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in _FREE:
            self._count.operations[name] += 1
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in _WAITS or by_mask:
            self._count.waits[name] += 1
        return function(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """On a CPU the dispatcher does not see them."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "tolist":
            self._count.waits["tolist"] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Count]:
    count = Count()
    with _Operations(count), _Lists(count):
        yield count
