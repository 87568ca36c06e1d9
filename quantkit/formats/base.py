"""The contract every weight format fulfils: the single place where layouts, writers, readers and kernels meet.

    weight --quantize--> QuantizedWeight --pack--> parts --(checkpoint)--> parts --unpack--> QuantizedWeight

A `QuantizedWeight` is what the mathematics produced (codes, scales, zero points ...), free of any layout. `parts` are
the tensors of one linear layer exactly as they stand on disk, keyed by their name behind the module path ("qweight",
"weight.absmax" ...). A `Format` is a frozen value that turns the one into the other. Two formats that hold the same
kind of quantized weight convert losslessly: `target.pack(source.unpack(parts))`.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats.engine_rules import EngineName, Refusal

Parts = dict[str, Tensor]
Shape = tuple[int, int]  # (out_features, in_features)
Index = slice | Tensor  # some outputs or inputs of a layer: a slice with start and stop, or int64 numbers in any order
ANY_LENGTH = -1  # in a PartSpec: a one-dimensional part whose length is known only when it is written

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


_BLOCK = re.compile(r".*?\.\d+\.")  # such as `model.layers.7.`
_hints = cache(get_type_hints)
_SPOKEN = {int: "a whole number", bool: "true or false", str: "text", float: "a number"}


class PartSpec(NamedTuple):
    """What a loader must allocate for one part."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Narrowed(NamedTuple):
    """Parts of a smaller layer, and where in the whole one it lies."""

    parts: Parts
    outputs: slice
    inputs: slice


class InputRounding(NamedTuple):
    """What a kernel does to a layer's inputs before it multiplies them."""

    arithmetic: str  # of the products: `int8` or `fp8`
    calibrated: bool = False  # by one scale that calibration found and `pack` stores; else by scales of their own
    outlier_threshold: float | None = None  # columns with a value of this magnitude or more stay in 16 bits


class QuantizedWeight(ABC):
    """One linear layer's weight as codes and their meaning, free of any storage layout."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """(out_features, in_features) of the weight it stands for."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that the codes stand for, computed in float32, then cast."""

    def cut(self, outputs: Index, inputs: Index) -> QuantizedWeight:
        """Some outputs and inputs; decodes to exactly that part of what the whole decodes to."""
        raise InputError(f"a {type(self).__name__} cannot be cut")

    def split_rows(self, sizes: list[int]) -> Sequence[QuantizedWeight]:
        """Layers that were stacked along their outputs, apart again."""
        ends = itertools.accumulate(sizes)
        return [
            self.cut(slice(end - size, end), slice(0, self.shape[1])) for size, end in zip(sizes, ends, strict=True)
        ]


class Format(ABC):
    """How the quantized weight of one linear layer looks on disk. Subclasses are frozen dataclasses of options."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]  # every part this format may own, required or not
    dtype_follows_model: ClassVar[bool]  # whether the option `dtype` defaults to the model's own dtype
    dtype: str
    bits: int

    def __post_init__(self) -> None:
        """Refuses options of the wrong type, which configs and recipes may bring; subclasses then check the values."""
        for option, hint in _hints(type(self)).items():
            value = getattr(self, option, None)
            if hint in (int, bool, str, float) and type(value) not in ((int, float) if hint is float else (hint,)):
                raise InputError(f"{self.name}: {option} is {value!r}, but must be {_SPOKEN[hint]}")

    @abstractmethod
    def check(self, shape: Shape) -> None:
        """Raises InputError, naming the rule, when a layer of this shape cannot be stored."""

    def check_layer(self, module: str, shape: Shape) -> None:
        """`check`, with an error that names the layer."""
        try:
            self.check(shape)
        except InputError as error:
            raise InputError(f"{module} [{shape[0]} x {shape[1]}] as {self.name} {self.describe()}: {error}") from error

    @abstractmethod
    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        """Names, dtypes and shapes of the parts that `pack` returns."""

    def readable_parts(self, shape: Shape) -> dict[str, tuple[PartSpec, ...]]:
        """All that `unpack` reads: the parts as `pack` writes them first, then as other writers do."""
        return {name: (spec,) for name, spec in self.parts(shape).items()}

    @abstractmethod
    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """Rounds each weight [out, in] to its nearest code, without calibration data."""

    @abstractmethod
    def pack(self, quantized: QuantizedWeight) -> Parts:
        """Lays the codes out as parts; raises CannotHold when that would change their meaning."""

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Reads parts back; does not change them."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for tables, such as `W4 g128 sym`."""

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        """(out, in) of a stored layer from its parts' sizes; `read` gives a part where the sizes are not enough."""
        return sizes["weight"][0], sizes["weight"][1]

    def nbytes(self, shape: Shape) -> int:
        """Bytes of a layer of this shape; exact, but for a few bytes where only writing tells the length of a part."""
        specs = self.parts(shape).values()
        known = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs if ANY_LENGTH not in spec.shape)
        return known + _unknown_bytes(self, shape[1])

    @property
    def scales_tensor(self) -> bool:
        """Whether one scale covers the tensor: layers that engines run as one matrix then share it."""
        return False

    @property
    def input_rounding(self) -> InputRounding | None:
        """What becomes of a layer's inputs; None: they stay in 16 bits, and so do the products."""
        return None

    def served_inputs(self, inputs: Tensor, quantized: QuantizedWeight | None = None) -> Tensor:
        """The inputs [..., in] of one call as a kernel sees them: rounded and decoded back, in their own dtype.

        `quantized`, the layer's weight, is needed where it carries a scale for them. Inputs in 16 bits are rounded once
        more when they are decoded; use float32 to see the format alone.
        """
        return inputs

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        """Views of the parts that hold at least these outputs and inputs of a layer, as parts of a smaller layer.

        Parts may be mapped files: what lies outside the views is not read. Codes that share a word or a scale stay
        together, so the views may hold more; `QuantizedWeight.cut` takes off the rest.
        """
        return Narrowed(dict(parts), slice(0, shape[0]), slice(0, shape[1]))

    def input_unit(self, inputs: int) -> int:
        """How many neighbouring inputs of a layer share a scale: where its inputs can be cut at no cost."""
        return 1

    @property
    def output_unit(self) -> int:
        """How many neighbouring outputs share a scale that no part of them can have alone; 1: any can be taken."""
        return 1

    def needs_all_inputs(self, share: int) -> bool:
        """Whether a layer with this share of the inputs cannot round them as the whole layer would."""
        return False

    def scattered_groups(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The group of every input [in], where act-order scattered them."""
        return None

    def with_input_scale(self, quantized: QuantizedWeight, absmax: Tensor | float) -> QuantizedWeight:
        """The weight with a scale for inputs up to `absmax`, the largest magnitude that calibration saw.

        The weight as it is, where the format stores no such scale.
        """
        return quantized

    def refusals(self) -> Iterator[Refusal]:
        """The engines that do not load layers of this format, whatever else is in the checkpoint."""
        yield from ()

    @property
    def only_float16_elsewhere(self) -> bool:
        """Whether vLLM and SGLang have kernels for this layout that take activations in float16 only."""
        return False

    def example(self, shape: Shape) -> QuantizedWeight:
        """Any weight of this shape, for whoever asks which kernels take the format."""
        return self.quantize(torch.ones(shape))

    def encode(self, weight: Tensor) -> Parts:
        """Nearest-rounded parts of a weight."""
        return self.pack(self.quantize(weight))

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that parts stand for."""
        return self.unpack(parts).dequantize(dtype)


class TensorInfo(NamedTuple):
    """What a safetensors header says about one tensor: its dtype in safetensors' spelling, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Dialect(ABC):
    """How a whole checkpoint says what is quantized and how: one value of `quant_method` in config.json."""

    quant_method: ClassVar[str]
    formats: ClassVar[tuple[type[Format], ...]]
    readers: ClassVar[Mapping[EngineName, str]]  # which engines read it, by the source that says so
    refusals: ClassVar[tuple[Refusal, ...]] = ()  # of engines that read nothing of it
    packages: ClassVar[Mapping[EngineName, tuple[str, ...]]] = {}  # that an engine needs beside itself to load it
    serve_flags: ClassVar[Mapping[EngineName, str]] = {}  # that an engine's command needs
    cut_elsewhere: ClassVar[bool] = True  # whether vLLM and SGLang divide its layers among GPUs
    lists_gates: ClassVar[bool] = True  # whether routers and gates are named among the layers left as they were
    holds_kv_scales: ClassVar[bool] = False  # whether readers look for scales of an FP8 cache beside its layers
    refusals_of_experts: ClassVar[tuple[Refusal, ...]] = ()  # seen with transformers 5.22 (docs/reference/interop.md)

    @abstractmethod
    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        """The quantization_config for these quantized modules and these linear layers left as they were."""

    @abstractmethod
    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        """The format of every quantized module, from a quantization_config and the tensors that are there."""

    def side_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """JSON files beside config.json that older readers look for."""
        return {}


@cache
def _unknown_bytes(fmt: Format, inputs: int) -> int:
    """Of the parts whose length only writing tells, as it turns out for one row."""
    unknown = [name for name, spec in fmt.parts((1, inputs)).items() if ANY_LENGTH in spec.shape]
    row = fmt.encode(torch.linspace(-1, 1, inputs).unsqueeze(0)) if unknown else {}
    return sum(row[name].nbytes for name in unknown)


def quotient(values: Tensor, divisor: float) -> Tensor:
    """values / divisor, the same on every device: CUDA would multiply by the reciprocal of a plain number."""
    return values / torch.full_like(values, divisor)


def widen(part: slice, unit: int, size: int) -> slice:
    """The smallest slice of whole units around another one; the last unit may be short."""
    return slice(part.start // unit * unit, min(-(-part.stop // unit) * unit, size))


def scaled(part: slice, numerator: int, denominator: int) -> slice:
    """Where the words or groups of a slice lie, `numerator` of which belong to `denominator` inputs or outputs."""
    return slice(part.start * numerator // denominator, -(-part.stop * numerator // denominator))


def check_choice(what: str, value: object, allowed: tuple[Any, ...]) -> None:
    """One wording for options outside their set."""
    if value not in allowed:
        raise InputError(f"{what} is {value!r}, but must be one of {', '.join(map(str, allowed))}")


def check_divides(what: str, size: int, divisor: int, remedy: str) -> None:
    """One wording for sizes that a layout cannot cut evenly."""
    if size % divisor:
        raise InputError(f"{what} is {size}, which {divisor} does not divide; {remedy}")


def name_in_block(module: str) -> str | None:
    """`mlp.up_proj` of `model.layers.7.mlp.up_proj`; None for a module outside the blocks."""
    match = _BLOCK.match(module)
    return module[match.end() :] if match else None


def modules_with(suffix: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Module paths that own a tensor `<path>.<suffix>`."""
    ending = "." + suffix
    return [name[: -len(ending)] for name in tensors if name.endswith(ending)]


def stored_dtype(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The dtype, in torch's spelling, of a tensor that must be there."""
    if name not in tensors:
        raise InputError(f"the checkpoint is incomplete: tensor {name} is missing; download or quantize it again")
    spelling = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    return spelling.get(tensors[name].dtype, tensors[name].dtype)
