"""The order in which the weight-only kernels want their codes: made once, when a checkpoint is loaded.

Inputs are cut into chunks of 128, a chunk into eight slabs of 16. Lane r (0..15) of a chunk holds the codes of inputs
16 j + r, slab j = 0..7, so that decoding slab j of 16 lanes gives 16 consecutive inputs: the depth of one tensor-core
product, with x read in its natural order.

    bits   words (one a lane)                                high (one a lane)
    4      int32, code of slab j in bits 4j .. 4j+3          -
    8      int32, slabs 0..3 in bytes 0..3                   int32, slabs 4..7
    2      int16, code of slab j in bits 2j, 2j+1            -
    3      int16, the low two bits as above                  uint8, the top bit of slab j in bit j

    words, high  [chunks, rows, 16]     rows = outputs, rounded up to 128; padding decodes to finite numbers
    scales       [groups, rows]         as stored on disk, or
    nested       uint8 [groups, rows]   block scales in 8 bits, with a float32 scale for every 256 of them; NVFP4: for
                                        every row, and all of them the same
    zeros        int32 [words, rows]    zero points in bytes: one of a larger group, or up to four of a chunk's groups;
                                        None where every zero point is the middle code

8-bit codes are stored as signed bytes (code - 128). Groups are padded to whole chunks like the inputs. Zero points are
needed before the product, so they come in words of 4 bytes: smaller ones cannot be copied to shared memory in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CodebookWeight, IntegerWeight, QuantizedWeight
from quantkit.formats.codebook import DividedScales, NestedScales, table_of
from quantkit.formats.integer import middle_code
from quantkit.kernels.card import Card
from quantkit.kernels.linear.dispatch import BUCKETS, bucket_of
from quantkit.kernels.linear.weight import CHUNK, ROWS, TICKETS, Choice, Kernel, LinearWeight, padded

SLABS = 8
LANES = 16
MANY_TOKENS = 4096  # H200, Llama-3.1-8B in W4: a step of 8,192 tokens takes 203 ms decoded once, 227 with `hopper`
# Kinds that were measured, for groups and zero points that were not.
_RELATIVES = {
    "int2": "int2-g64-zeros",
    "int3": "int3-g128",
    "int4": "int4-g128",
    "int8": "int8-g128",
    "nf4": "nf4-g64-nested",
    "fp4": "fp4-g64-nested",
}


@dataclass(frozen=True)
class Nested:
    """Block scales that are themselves in 8 bits: `table[codes] * scales[block // every] + offset`.

    Layers that are joined along their outputs have an offset each, so every 128 outputs have one of their own.
    """

    codes: Tensor  # uint8 [groups, rows]
    table: Tensor  # float32 [256]
    scales: Tensor  # float32 [ceil(blocks / every)], blocks counted along the rows of the weight
    offsets: Tensor  # float32 [rows / 128]
    every: int


@dataclass(frozen=True)
class PackedWeight:
    """One linear layer's weight as the weight-only kernels read it."""

    code_type: str  # int2 | int3 | int4 | int8 | nf4 | fp4 | e2m1
    outputs: int
    inputs: int
    group: int  # inputs per scale: 16, 32, 64, or a multiple of 128
    words: Tensor
    high: Tensor | None
    scales: Tensor | None  # None where they are nested
    zeros: Tensor | None  # None: every zero point is the middle code, or the kind has none
    nested: Nested | None
    order: Tensor | None  # act-order: the kernel's input i is the layer's input order[i]
    table: Tensor | None  # float32 [16], the values of nf4, fp4 and e2m1
    one_group: bool  # one scale per output
    tickets: Tensor  # int32, zero between calls: which split of the inputs is the last to arrive

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return middle_code(int(self.code_type[3:])) if self.code_type.startswith("int") else 0

    @property
    def zero_points(self) -> int:
        """How many different zero points one output has in a chunk; 0 where all are the middle code."""
        return 0 if self.zeros is None else max(1, CHUNK // self.group)

    def arguments(self) -> tuple[Tensor | None, ...]:
        """What the kernels read, in the order in which `skinny.py` and `dequantize.py` take it."""
        nested = self.nested
        levels = (nested.codes, nested.table, nested.scales, nested.offsets) if nested else (None, None, None, None)
        return self.words, self.high, self.scales, self.zeros, *levels, self.table

    def constants(self) -> dict[str, object]:
        """What the kernels are compiled for."""
        return {
            "KIND": self.code_type,
            "GROUP": self.group,
            "ONE_GROUP": self.one_group,
            "HAS_ZEROS": self.zeros is not None,
            "NESTED_EVERY": self.nested.every if self.nested else 0,
        }

    @property
    def table_values(self) -> tuple[float, ...]:
        return tuple(table_of(self.code_type).tolist()) if self.table is not None else ()

    @property
    def rows(self) -> int:
        return self.words.shape[1]

    @property
    def chunks(self) -> int:
        return self.words.shape[0]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        nested = (self.nested.codes, self.nested.table, self.nested.scales, self.nested.offsets) if self.nested else ()
        held = (self.words, self.high, self.scales, self.zeros, self.order, self.table, *nested)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    @property
    def kind(self) -> str:
        group = "row" if self.one_group else f"g{self.group}"
        extras = ("-zeros" if self.zeros is not None else "") + ("-nested" if self.nested is not None else "")
        return f"{self.code_type}-{group}{extras}"

    @property
    def relatives(self) -> tuple[str, ...]:
        """None of FP4 with a scale for 16 or 32 inputs, and none of integers with one for 16 (GGUF): what was measured
        for fewer scales spills there."""
        return (_RELATIVES[self.code_type],) if self.code_type in _RELATIVES and self.group > 16 else ()

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS

    @property
    def output_unit(self) -> int:
        return ROWS

    @property
    def token_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        from quantkit.kernels.linear.weight_only.choices import KERNELS  # needs Triton

        return KERNELS

    def bucket(self, tokens: int) -> int | None:
        return None if tokens >= MANY_TOKENS else bucket_of(tokens)

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        from quantkit.kernels.linear.weight_only.choices import default

        return default(self, tokens, card)

    def candidates(self, tokens: int) -> Iterator[Choice]:
        from quantkit.kernels.linear.weight_only.choices import candidates

        return candidates(self, tokens)

    def join(self, others: Sequence[LinearWeight]) -> PackedWeight | None:
        from quantkit.kernels.linear.weight_only.join import join_packed

        alike = [weight for weight in others if isinstance(weight, PackedWeight)]
        return join_packed([self, *alike]) if len(alike) == len(others) else None


def why_not(weight: QuantizedWeight) -> str | None:
    """Why the weight-only kernels cannot take this weight; None when they can."""
    if isinstance(weight, CodebookWeight):
        return _why_not_group(weight.block, weight.shape[1])
    if not isinstance(weight, IntegerWeight):
        return f"{type(weight).__name__} is not a grouped integer or 4-bit table weight"
    if weight.bits not in (2, 3, 4, 8):
        return f"{weight.bits}-bit codes; only 2, 3, 4 and 8 bits have a kernel"
    if weight.group_of is not None and not _sorts_into_groups(weight):
        return "act-order groups of unequal size"
    return _why_not_group(weight.group_size, weight.shape[1])


def _why_not_group(group: int, inputs: int) -> str | None:
    if group == inputs:
        return None
    if inputs % group:
        return f"groups of {group} do not divide {inputs} inputs"
    if group in (16, 32, 64) or group % CHUNK == 0:
        return None
    return f"groups of {group}; a kernel takes 16, 32, 64, multiples of 128, or the whole row"


def _sorts_into_groups(weight: IntegerWeight) -> bool:
    counts = torch.bincount(weight.input_groups(), minlength=weight.scales.shape[1])
    return bool((counts == weight.group_size).all())


def lay_out(weight: QuantizedWeight) -> PackedWeight:
    """In the order of the kernels, on the device where its codes are."""
    reason = why_not(weight)
    if reason is not None:
        raise InputError(f"weight-only kernels cannot take {reason}; decode the weight instead")
    return _lay_out_integer(weight) if isinstance(weight, IntegerWeight) else _lay_out_codebook(weight)  # type: ignore[arg-type]


def _lay_out_integer(weight: IntegerWeight) -> PackedWeight:
    outputs, inputs = weight.shape
    order = None
    codes = weight.codes
    if weight.group_of is not None:
        order = torch.argsort(weight.input_groups(), stable=True).to(torch.int32)
        codes = codes[:, order.long()]
    if weight.bits == 8:
        codes = codes ^ 128
    words, high = _lanes(codes, weight.bits)
    return PackedWeight(
        code_type=f"int{weight.bits}",
        outputs=outputs,
        inputs=inputs,
        group=_group(weight.group_size, inputs),
        words=words,
        high=high,
        scales=_by_group(weight.scales, weight.group_size),
        zeros=None if weight.symmetric else _zero_words(weight.zeros, weight.group_size),
        nested=None,
        order=order,
        table=None,
        one_group=weight.scales.shape[1] == 1,
        tickets=torch.zeros(TICKETS, dtype=torch.int32, device=codes.device),
    )


def _lay_out_codebook(weight: CodebookWeight) -> PackedWeight:
    outputs, inputs = weight.shape
    device = weight.codes.device
    words, high = _lanes(weight.codes.view(outputs, inputs), 4)
    scales, nested = None, None
    if isinstance(weight.absmax, NestedScales):
        nested = Nested(
            codes=_by_group(weight.absmax.codes.view(outputs, -1), weight.block),
            table=weight.absmax.table.to(device),
            scales=_cover_padding(weight.absmax, words.shape[1], outputs),
            offsets=torch.full((words.shape[1] // ROWS,), weight.absmax.offset, device=device),
            every=weight.absmax.block,
        )
    elif isinstance(weight.absmax, DividedScales):
        nested = _divided(weight.absmax, outputs, inputs // weight.block, weight.block)
    else:
        scales = _by_group(weight.absmax.view(outputs, -1), weight.block)
    return PackedWeight(
        code_type=weight.kind,
        outputs=outputs,
        inputs=inputs,
        group=_group(weight.block, inputs),
        words=words,
        high=high,
        scales=scales,
        zeros=None,
        nested=nested,
        order=None,
        table=table_of(weight.kind).to(device),
        one_group=weight.block == inputs,
        tickets=torch.zeros(TICKETS, dtype=torch.int32, device=device),
    )


def _divided(scales: DividedScales, outputs: int, groups: int, block: int) -> Nested:
    """As nested scales: the table has the values of all bytes, and rows share no second level, so that layers join."""
    values = torch.arange(256, dtype=torch.uint8, device=scales.values.device).view(torch.float8_e4m3fn).float()
    rows = padded(outputs, ROWS)
    return Nested(
        codes=_by_group(scales.values.view(torch.uint8).view(outputs, groups), block),
        table=values,
        scales=(1 / scales.divisor).expand(rows + -(-CHUNK // groups)).contiguous(),  # for padded inputs too
        offsets=values.new_zeros(rows // ROWS),
        every=groups,
    )


def _cover_padding(nested: NestedScales, rows: int, outputs: int) -> Tensor:
    """Scales of the second level for padded outputs too, so that kernels need no mask."""
    blocks = nested.codes.numel() // outputs * rows + CHUNK
    return torch.nn.functional.pad(nested.scales, (0, -(-blocks // nested.block) - nested.scales.numel()))


def _group(group: int, inputs: int) -> int:
    """A row of inputs as one group counts the padding too."""
    return padded(inputs, CHUNK) if group == inputs and group not in (16, 32, 64) else group


def _by_group(values: Tensor, group: int) -> Tensor:
    """[outputs, groups] -> [groups, rows], outputs side by side."""
    outputs, groups = values.shape
    whole = padded(groups, max(1, CHUNK // group))
    margins = (0, padded(outputs, ROWS) - outputs, 0, whole - groups)
    return torch.nn.functional.pad(values.mT, margins).contiguous()


def _zero_words(zeros: Tensor, group: int) -> Tensor:
    """uint8 [outputs, groups] -> int32 [words, rows]."""
    fields = min(4, max(1, CHUNK // group))
    bytes_ = _by_group(zeros, group).unflatten(0, (-1, fields))  # [words, fields, rows]
    return _join(bytes_.unsqueeze(-1), 8).squeeze(-1)


def _lanes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """uint8 codes [outputs, inputs] -> words and high, both [chunks, rows, 16]."""
    outputs, inputs = codes.shape
    codes = torch.nn.functional.pad(codes, (0, padded(inputs, CHUNK) - inputs, 0, padded(outputs, ROWS) - outputs))
    slabs = codes.view(-1, codes.shape[1] // CHUNK, SLABS, LANES).permute(1, 2, 0, 3)  # [chunks, slab, rows, lane]
    if bits == 8:
        halves = slabs.unflatten(1, (2, 4))
        return _join(halves[:, 0], 8), _join(halves[:, 1], 8)
    if bits == 3:
        return _join(slabs & 3, 2).to(torch.int16), _join(slabs >> 2, 1).to(torch.uint8)
    words = _join(slabs, bits)
    return (words.to(torch.int16) if bits == 2 else words), None


def _join(fields: Tensor, bits: int) -> Tensor:
    """uint8 [chunks, field, rows, lane] -> int32 [chunks, rows, lane], field f in bits f * bits and up."""
    words = torch.zeros_like(fields[:, 0], dtype=torch.int32)
    for field in range(fields.shape[1]):
        words |= fields[:, field].int() << (field * bits)
    return words.contiguous()
