"""Triton's interpreter without work that it repeats: the kernels' tests take less than half of the time.

It replaces the functions of `triton.language` when a kernel is launched, and looks for functions to replace again
whenever a kernel calls another jitted function, though none are left. It builds a table of all types whenever it looks
up one of them, and every value's shape anew. It converts small floats bit by bit, of which there are few. And it
computes whether a sum overflows, for an assertion that it then skips, since it does not debug.
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
    _share_shapes(tl.core, type(interpreter.interpreter_semantic))
    interpreter._convert_float = _by_table(interpreter._convert_float)
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _share_shapes(core: Any, semantic: Any) -> None:
    """Types of one shape share what is known of it, so that two values of it need no look to be of one shape."""
    init, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    no_shape = core.tuple([]), core.constexpr(1)

    @cache
    def shape_facts(sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """The shape and its size, as a type has them and as a value has them; how the shape is written."""
        checked = core.block_type.__new__(core.block_type)
        init(checked, core.int8, list(sizes))
        each = core.tuple([core.constexpr(size) for size in sizes])
        return checked.shape, checked.numel, each, core.constexpr(checked.numel), str(checked.shape)

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        self.element_ty = element_ty
        self.shape, self.numel, self.value_shape, self.value_numel, written = shape_facts(sizes)
        self.name = f"<{written}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = (type.value_shape, type.value_numel) if type.is_block() else no_shape

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
    semantic.broadcast_impl_value = broadcast_unless_alike


def _by_table(convert: Callable[..., Any]) -> Callable[..., Any]:
    """What floats become, looked up by their leading bits: those of a result, and the one that it is rounded by."""

    @cache
    def table(from_dtype: Any, to_dtype: Any, rounding: Any, bits: int) -> Any:
        width = from_dtype.primitive_bitwidth
        every = numpy.arange(1 << bits, dtype=f"uint{width}") << (width - bits)
        return convert(every, from_dtype, to_dtype, rounding)

    def look_up(values: Any, from_dtype: Any, to_dtype: Any, rounding: Any) -> Any:
        width, digits = from_dtype.primitive_bitwidth, from_dtype.fp_mantissa_width
        bits = min(width, width - digits + to_dtype.fp_mantissa_width + 1)
        patterns = values.view(f"uint{width}")
        below_normal = (patterns << 1 >> (digits + 1) == 0) & (patterns << 1 != 0)  # all of their bits count
        if bits > 17 or (bits < width and bool(below_normal.any())):
            return convert(values, from_dtype, to_dtype, rounding)
        return table(from_dtype, to_dtype, rounding, bits)[patterns >> (width - bits)]

    return look_up
