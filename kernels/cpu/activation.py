"""Gate times up on a CPU, the gate through SiLU; meaning as `reference.elementwise.gated_activation` has it."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import load_floats, rounded, store_floats
from quantkit.kernels.cpu.language import Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import along, exp, load_integers
from quantkit.kernels.reference import elementwise


def gated_activation(gate_up: Tensor, activation: str, *, clip: tuple[float, float] | None = None) -> Tensor:
    """SiLU without limits is a kernel; others are torch's."""
    if activation != "silu" or clip is not None or not gate_up.is_contiguous():
        return elementwise.gated_activation(gate_up, activation, clip=clip)
    tokens, both = gate_up.shape
    out = gate_up.new_empty(tokens, both // 2)
    arguments = [gate_up.data_ptr(), out.data_ptr(), both // 2]
    shared_pool().run(_kernel(gate_up.dtype), arguments, tokens)
    return out


@cache
def _kernel(dtype: torch.dtype) -> int:
    return compiled("activation", 3, partial(_activate, dtype=dtype))


def _activate(code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype) -> None:
    source, out, width = load_integers(code, arguments, 3)
    with code.loop(first, last) as row:
        gates = source + row * width * (2 * dtype.itemsize)
        ups, result = gates + width * dtype.itemsize, out + row * width * dtype.itemsize

        def write(place: Value, lanes: int, gates: Value = gates, ups: Value = ups, to: Value = result) -> None:
            gate, up = (load_floats(code, dtype, lanes, address, place) for address in (gates, ups))
            zero, one = code.constant(gate.type, 0.0), code.constant(gate.type, 1.0)
            active = rounded(code, dtype, gate // (exp(code, zero - gate) + one))
            store_floats(code, dtype, active * up, to, place)

        along(code, width, write)
