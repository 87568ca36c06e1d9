"""A small language for kernels on a CPU: Python writes the code, LLVM compiles it for the processor that is there.

A kernel is a Python function that is called once with a `Code`, and whose operators append instructions to it:

    def add(code: Code, numbers: Value, first: Value, last: Value) -> None:
        with code.loop(first, last, 16) as place:
            values = code.load(F32.x(16), numbers, place)
            code.store(values + 1.0, numbers, place)

What is known when the kernel is written (how many bits, which dtype, how many tokens at a time) is plain Python: `if`
and `for` choose and repeat instructions. Vectors may be longer than those of the processor; LLVM cuts them. Addresses
and sizes are I64. Integers have no sign: operations do (`>>` is logical, `to_float` signed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from quantkit.kernels.cpu.processor import Processor


@dataclass(frozen=True)
class Type:
    """Of a number, or with lanes of a vector of them."""

    element: str
    lanes: int = 0

    def x(self, lanes: int) -> Type:
        return Type(self.element, lanes)

    @property
    def bits(self) -> int:
        return int(self.element[1:])

    @property
    def is_float(self) -> bool:
        return self.element[0] == "f"

    @property
    def llvm(self) -> ir.Type:
        number = _ELEMENTS[self.element]
        return ir.VectorType(number, self.lanes) if self.lanes else number

    def constant(self, value: Any) -> ir.Constant:
        """One number for all lanes, or a number for each."""
        if not self.lanes:
            return ir.Constant(self.llvm, value)
        numbers = value if isinstance(value, Sequence) else [value] * self.lanes
        return ir.Constant(self.llvm, [ir.Constant(_ELEMENTS[self.element], number) for number in numbers])


_ELEMENTS = {
    "i1": ir.IntType(1),
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
}
I8, I16, I32, I64 = Type("i8"), Type("i16"), Type("i32"), Type("i64")
F16, F32 = Type("f16"), Type("f32")

Number = int | float


class Value:
    """What an instruction gave; operators append the next one. Python numbers take the type of the other side."""

    def __init__(self, code: Code, type: Type, llvm: Any) -> None:
        self.code, self.type, self.llvm = code, type, llvm

    def _with(self, other: Value | Number, floats: str, integers: str) -> Value:
        name = floats if self.type.is_float else integers
        right = other.llvm if isinstance(other, Value) else self.type.constant(other)
        return Value(self.code, self.type, getattr(self.code.builder, name)(self.llvm, right))

    def __add__(self, other: Value | Number) -> Value:
        return self._with(other, "fadd", "add")

    def __sub__(self, other: Value | Number) -> Value:
        return self._with(other, "fsub", "sub")

    def __mul__(self, other: Value | Number) -> Value:
        return self._with(other, "fmul", "mul")

    def __floordiv__(self, other: Value | Number) -> Value:
        return self._with(other, "fdiv", "sdiv")

    def __and__(self, other: Value | int) -> Value:
        return self._with(other, "", "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._with(other, "", "or_")

    def __xor__(self, other: Value | int) -> Value:
        return self._with(other, "", "xor")

    def __lshift__(self, other: Value | int) -> Value:
        return self._with(other, "", "shl")

    def __rshift__(self, other: Value | int) -> Value:
        return self._with(other, "", "lshr")

    def __lt__(self, other: Value | Number) -> Value:
        right = other.llvm if isinstance(other, Value) else self.type.constant(other)
        compare = self.code.builder.fcmp_ordered if self.type.is_float else self.code.builder.icmp_signed
        return Value(self.code, Type("i1", self.type.lanes), compare("<", self.llvm, right))

    def equals(self, other: Value | Number) -> Value:
        right = other.llvm if isinstance(other, Value) else self.type.constant(other)
        compare = self.code.builder.fcmp_ordered if self.type.is_float else self.code.builder.icmp_signed
        return Value(self.code, Type("i1", self.type.lanes), compare("==", self.llvm, right))

    def signed_shift(self, bits: int) -> Value:
        """To the right, keeping the sign."""
        return self._with(bits, "", "ashr")

    def put(self, number: Value, lane: Value) -> Value:
        """With another number in one lane."""
        return Value(self.code, self.type, self.code.builder.insert_element(self.llvm, number.llvm, lane.llvm))

    def at(self, lane: Value | int) -> Value:
        """The number in one lane."""
        place = lane.llvm if isinstance(lane, Value) else ir.Constant(ir.IntType(32), lane)
        return Value(self.code, Type(self.type.element), self.code.builder.extract_element(self.llvm, place))

    def cut(self, start: int, lanes: int) -> Value:
        """Some of the lanes."""
        return self.pick(range(start, start + lanes))

    def pick(self, lanes: Sequence[int]) -> Value:
        """Lanes in any order, each any number of times."""
        places = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
        absent = ir.Constant(self.llvm.type, ir.Undefined)
        picked = self.code.builder.shuffle_vector(self.llvm, absent, places)
        return Value(self.code, self.type.x(len(lanes)), picked)

    def splat(self, lanes: int) -> Value:
        """A number in all lanes."""
        vector = self.type.x(lanes)
        first = ir.Constant(ir.IntType(32), 0)
        held = self.code.builder.insert_element(ir.Constant(vector.llvm, ir.Undefined), self.llvm, first)
        return Value(self.code, vector, held).pick([0] * lanes)

    def view(self, type: Type) -> Value:
        """The same bits as another type of the same size."""
        return Value(self.code, type, self.code.builder.bitcast(self.llvm, type.llvm))

    def to(self, element: Type, *, signed: bool = True) -> Value:
        """Another kind of number: integers are cut or widened, floats rounded; float to integer rounds towards 0."""
        target, builder = Type(element.element, self.type.lanes), self.code.builder
        if self.type.is_float and target.is_float:
            convert = builder.fptrunc if target.bits < self.type.bits else builder.fpext
        elif self.type.is_float:
            convert = builder.fptosi
        elif target.is_float:
            convert = builder.sitofp if signed else builder.uitofp
        elif target.bits < self.type.bits:
            convert = builder.trunc
        else:
            convert = builder.sext if signed else builder.zext
        return self if target == self.type else Value(self.code, target, convert(self.llvm, target.llvm))


class Variable:
    """A value that changes from one turn of a loop to the next; LLVM keeps it in registers."""

    def __init__(self, code: Code, start: Value) -> None:
        self.code, self.type = code, start.type
        with code.builder.goto_entry_block():
            self.place = code.builder.alloca(start.type.llvm)
        self.set(start)

    def get(self) -> Value:
        return Value(self.code, self.type, self.code.builder.load(self.place, typ=self.type.llvm))

    def set(self, value: Value) -> None:
        self.code.builder.store(value.llvm, self.place)


class Code:
    """Instructions of one function, for one processor."""

    def __init__(self, builder: ir.IRBuilder, processor: Processor) -> None:
        self.builder, self.processor = builder, processor

    def constant(self, type: Type, value: Any) -> Value:
        return Value(self, type, type.constant(value))

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    def room(self, type: Type, count: int = 1) -> Value:
        """The address of memory for so many values, the function's own."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(type.llvm, count))
        return Value(self, I64, self.builder.ptrtoint(place, I64.llvm))

    def load(self, type: Type, address: Value, place: Value | int = 0) -> Value:
        """From any address; `place` counts numbers of the type."""
        pointer = self._pointer(type, address, place)
        loaded = self.builder.load(pointer, typ=type.llvm, align=type.bits // 8)
        return Value(self, type, loaded)

    def store(self, value: Value, address: Value, place: Value | int = 0) -> None:
        self.builder.store(value.llvm, self._pointer(value.type, address, place), align=value.type.bits // 8)

    def ask(self, address: Value) -> None:
        """For the line of memory around any address, which will be read soon."""
        pointer = self.builder.inttoptr(address.llvm, ir.IntType(8).as_pointer())
        function = self._function("llvm.prefetch.p0", ir.VoidType(), [pointer.type, *[ir.IntType(32)] * 3])
        read, keep, data = (ir.IntType(32)(number) for number in (0, 3, 1))
        self.builder.call(function, [pointer, read, keep, data])

    def _pointer(self, type: Type, address: Value, place: Value | int) -> Any:
        bytes_each = type.bits // 8
        return self.builder.inttoptr((address + place * bytes_each).llvm, type.llvm.as_pointer())

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """`for place in range(start, stop, step)`."""
        place = self.variable(start if isinstance(start, Value) else self.constant(I64, start))
        head, body, after = (self.builder.append_basic_block(name) for name in ("head", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((place.get() < stop).llvm, body, after)
        self.builder.position_at_end(body)
        yield place.get()
        place.set(place.get() + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """`while True`, ended by a condition that does not hold: `with code.repeat() as again: again(a < b)`."""
        head, after = (self.builder.append_basic_block(name) for name in ("again", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)

        def again(condition: Value) -> None:
            more = self.builder.append_basic_block("more")
            self.builder.cbranch(condition.llvm, more, after)
            self.builder.position_at_end(more)

        yield again
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.llvm):
            yield

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, yes.type, self.builder.select(condition.llvm, yes.llvm, no.llvm))

    def smaller(self, left: Value, right: Value) -> Value:
        return self.select(left < right, left, right)

    def larger(self, left: Value, right: Value) -> Value:
        return self.select(left < right, right, left)

    def call(self, name: str, result: Type, *values: Value) -> Value:
        """One of LLVM's own functions (`llvm.fma.v16f32`), or one of the C library."""
        return Value(self, result, self._call(name, result.llvm, values))

    def do(self, name: str, *values: Value) -> None:
        """The same for a function without a result."""
        self._call(name, ir.VoidType(), values)

    def _call(self, name: str, result: ir.Type, values: Sequence[Value]) -> Any:
        function = self._function(name, result, [value.type.llvm for value in values])
        return self.builder.call(function, [value.llvm for value in values])

    def _function(self, name: str, result: ir.Type, types: Sequence[ir.Type]) -> Any:
        module = self.builder.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, types), name)

    def join(self, parts: Sequence[Value]) -> Value:
        """Vectors of one length behind each other; as many as a power of two."""
        if len(parts) == 1:
            return parts[0]
        pairs = []
        for left, right in zip(parts[::2], parts[1::2], strict=True):
            lanes = 2 * left.type.lanes
            places = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(lanes)))
            pairs.append(Value(self, left.type.x(lanes), self.builder.shuffle_vector(left.llvm, right.llvm, places)))
        return self.join(pairs)

    def fma(self, left: Value, right: Value, addend: Value) -> Value:
        return self.call(f"llvm.fma.{_suffix(addend.type)}", addend.type, left, right, addend)

    def of_each(self, name: str, *values: Value) -> Value:
        """A function of LLVM that maps lanes: `fabs`, `maximum`, `rint`, `exp` ..."""
        return self.call(f"llvm.{name}.{_suffix(values[0].type)}", values[0].type, *values)

    def over_lanes(self, name: str, values: Value) -> Value:
        """One number from all lanes: `add` of integers, `fmaximum` of floats."""
        return self.call(f"llvm.vector.reduce.{name}.{_suffix(values.type)}", Type(values.type.element), values)


def _suffix(type: Type) -> str:
    return f"v{type.lanes}{type.element}" if type.lanes else type.element
