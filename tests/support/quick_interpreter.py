"""Triton's interpreter without work that it repeats: the kernels' tests take less than half of the time.

It replaces the functions of `triton.language` when a kernel is launched, and looks for functions to replace again
whenever a kernel calls another jitted function, though none are left. It builds a table of all types whenever it looks
up one of them. And it computes whether a sum overflows, for an assertion that it then skips, since it does not debug.
What kernels compute stays the same. Made for Triton 3.7; another version runs as it is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy


def speed_up() -> None:
    """Call before the first launch."""
    try:
        import triton
    except ImportError:  # there is none for this platform
        return
    if not triton.__version__.startswith("3.7."):
        return
    from triton import language as tl
    from triton.runtime import interpreter

    patched: set[tuple[bool, bool]] = set()  # the modules of functions called in the present launch
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @cache
    def sees(fn: Callable[..., Any]) -> tuple[bool, bool]:
        seen = fn.__globals__.values()
        return any(value is tl for value in seen), any(value is tl.core for value in seen)

    def patch_once(fn: Callable[..., Any]) -> Any:
        if sees(fn) in patched:
            return interpreter._LangPatchScope()  # nothing to undo
        patched.add(sees(fn))
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *args, **options)

    look_up = cache(interpreter._get_np_dtype)

    def type_of_numbers(kind: Any) -> Any:
        number = kind.scalar
        return numpy.dtype(numpy.uint64) if isinstance(number, tl.pointer_type) else look_up(number)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = type_of_numbers
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
