"""Launches on paper: the real launchers run, and what they would launch on a card is listed instead.

Triton specializes a kernel by its arguments: dtypes, integers that are 1 or that 16 divides, pointers on 16 bytes. Here
Triton itself does that with the arguments of each launch, for the target of the card, and is stopped before it
compiles; so what is listed has the very key by which a launch on that card looks for it in Triton's cache. Tensors need
no memory: on torch's device `meta` they have shapes and places alone.

For this Triton's driver and two methods of its kernels are replaced while the list is made, which Triton has no other
way for (its `jit_cache_hook` cannot write down the layouts of Gluon): do it in a process that launches nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quantkit.errors import InputError
from quantkit.kernels.card import Card, pretend
from quantkit.kernels.compiling.keys import settle_keys

Launcher = Callable[..., None]  # (kernel, *args, grid, warmup, **options), as `JITFunction.run`


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel as it is compiled for one kind of arguments."""

    name: str
    source: Any  # Triton's ASTSource: function, signature, constants, attributes
    target: GPUTarget
    options: Mapping[str, Any]  # warps, stages and what else changes the result

    def compile(self) -> str:
        """Its name in Triton's cache, where it is afterwards."""
        compiled = triton.compile(self.source, target=self.target, options=dict(self.options))
        return str(compiled.hash)


class PaperDriver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int | str:
        return self._target.arch  # type: ignore[no-any-return]  # Triton keeps what it compiled for each device

    def get_current_stream(self, device: int | str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def target_of(card: Card) -> GPUTarget:
    major, minor = card.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


@contextmanager
def instead_of_launches(card: Card, launch: Launcher, target: GPUTarget | None = None) -> Iterator[None]:
    """Within, `launch` is called for every launch, and everybody takes this card for the one that is here."""
    before, run = driver._active, JITFunction.run
    driver.set_active(PaperDriver(target or target_of(card)))
    JITFunction.run = launch
    try:
        with pretend(card):
            yield
    finally:
        JITFunction.run = run
        driver._active = before


@contextmanager
def listing(card: Card) -> Iterator[list[Kernel]]:
    """Within, every kernel that would be compiled for the card is listed once, in the order of first launches."""
    if triton.knobs.runtime.interpret:
        raise InputError("TRITON_INTERPRET is set, so kernels are interpreted and never compiled; unset it")
    settle_keys()
    kernels: list[Kernel] = []
    seen: set[tuple[int, str]] = set()
    target, run, compile_ = target_of(card), JITFunction.run, JITFunction._do_compile

    def note(self: Any, key: str, signature: Any, device: Any, constants: Any, options: Any, attributes: Any,
             *_: Any) -> None:  # fmt: skip
        if (id(self), key) not in seen:
            seen.add((id(self), key))
            source = self.ASTSource(self, signature, constants, attributes)
            kernels.append(Kernel(self.__name__, source, target, dict(vars(options))))

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    JITFunction._do_compile = note
    try:
        with instead_of_launches(card, launch, target):
            yield kernels
    finally:
        JITFunction._do_compile = compile_
