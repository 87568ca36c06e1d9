"""From a kernel in `language.py` to machine code: when it is first asked for, once in a process; the machine code comes
from the user's cache where it was compiled before (`object_cache.py`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import binding, ir

from quantkit.kernels.cpu.language import I64, Code, Value
from quantkit.kernels.cpu.object_cache import kept_object
from quantkit.kernels.cpu.processor import Processor, this_processor

Body = Callable[..., None]  # (code, *arguments), all arguments I64
_engines: list[Any] = []  # own the code, and live as long as the process


def compiled(name: str, arguments: int, body: Body) -> int:
    """The address of a C function `void name(int64_t, ...)`."""
    processor = this_processor()
    machine = _machine(processor)

    def compile() -> bytes:
        return bytes(machine.emit_object(_optimized(source(name, arguments, body, processor), machine)))

    code = kept_object(name, body, processor, compile)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(name))


@cache
def callable_at(address: int, arguments: int) -> Callable[..., None]:
    """For Python; other threads run meanwhile."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(address)


def assembly(name: str, arguments: int, body: Body, processor: Processor) -> str:
    """What it would be on another processor."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = _machine(processor)
    return str(machine.emit_assembly(_optimized(source(name, arguments, body, processor), machine)))


def source(name: str, arguments: int, body: Body, processor: Processor) -> str:
    """In LLVM's language."""
    module = ir.Module(name)
    module.triple = processor.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.llvm] * arguments), name)
    code = Code(ir.IRBuilder(function.append_basic_block("entry")), processor)
    body(code, *(Value(code, I64, argument) for argument in function.args))
    code.builder.ret_void()
    return str(module)


def _machine(processor: Processor) -> Any:
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(processor.triple)
    return target.create_target_machine(processor.cpu, processor.features, opt=3, jit=True)


def _optimized(text: str, machine: Any) -> Any:
    """Vectors are in the text already: nothing is left for LLVM's vectorizers."""
    module = binding.parse_assembly(text)
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module
