"""The output layer in fewer bits than its checkpoint has.

Checkpoints keep it in 16 bits, because half of the engines that read them cannot load a quantized one. With one request
and four-bit blocks it is a tenth of a step. `head_bits` rounds it when it is loaded: symmetric integers, each row in
groups of 128. Tokens come from the same embedding as before, but where kernels of a CPU multiply it: of a tied layer in
8 bits there is one matrix, and the embedding is read from it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtPacked, Format, QuantizedWeight, TensorInfo
from quantkit.formats.base import ANY_LENGTH
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.op import LinearWeight
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.layers import Linear
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.weight_sizes import held_dtype

NAME = "lm_head"
_GROUPS = (128, 64, 32)
_ROWS = 1 << 13  # rounded at a time, to need no second output layer in float32

Prepare = Callable[[str, Format, QuantizedWeight], LinearWeight]


def head_in_bits(head: Linear, bits: int | None, dtype: torch.dtype, prepare: Prepare) -> Linear:
    """The layer in so many bits; as it is where none are asked for, or where this rank has none."""
    if bits is None or not head.weights:
        return head
    (weight,) = head.weights
    if not isinstance(weight, Tensor):
        raise InputError(f"head_bits is {bits}, but the checkpoint has a quantized output layer already; leave it out")
    fmt = _format(weight.shape[1], bits, dtype)
    pieces = [prepare(NAME, fmt, fmt.quantize(rows)) for rows in weight.split(_ROWS)]
    joined = join(pieces)
    return Linear(tuple(pieces) if joined is None else (joined,), head.bias, head.gathered)


def more_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    bits: int | None,
    ranks: Ranks = Ranks(),  # noqa: B008  (a value)
) -> int:
    """What the weights of a rank take more with `bits` than without; less than 0 where they take less. At most so much
    on a CPU, where a tied layer of 8 bits is the embedding, too (`embedding.py`)."""
    if bits is None or not ranks.first_stage:
        return 0
    part = ranks.vocabulary(config.vocab)
    shape = (part.stop - part.start, config.hidden)
    specs = _format(config.hidden, bits, dtype).parts(shape).values()
    stored = sum(spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs if ANY_LENGTH not in spec.shape)
    held = held_dtype(TensorInfo("BF16", shape), dtype)  # as files have it
    return stored - (0 if config.tied else torch.Size(shape).numel() * held.itemsize)


def _format(hidden: int, bits: int, dtype: torch.dtype) -> CtPacked:
    group = next((group for group in _GROUPS if hidden % group == 0), -1)
    return CtPacked(bits=bits, group_size=group, sym=True, dtype=str(dtype)[6:])
