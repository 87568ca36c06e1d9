"""What `quantkit bench kernels` measures: formats and shapes by name, and one case = one line of the table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import InputError, did_you_mean
from quantkit.formats import Awq, CtFloat8, CtInt8, CtMxfp4, CtNvfp4, CtPacked, Format, Fp4, LlmInt8, Nf4
from quantkit.runtime.core.kv_dtypes import KV_DTYPES, KvKind, kv_kind

UNQUANTIZED = "bf16"  # computed in --dtype
ATTENTION = "attention"
DTYPES = ("bfloat16", "float16")

# Name -> the format for a model of some dtype, as the recipes set it.
FORMATS: dict[str, Callable[[str], Format]] = {
    "w4": lambda dtype: CtPacked(dtype=dtype),
    "w4a8": lambda dtype: CtPacked(activations="fp8", dtype=dtype),
    "w4-g64": lambda dtype: CtPacked(group_size=64, dtype=dtype),
    "w4-g32": lambda dtype: CtPacked(group_size=32, dtype=dtype),
    "w4-asym": lambda dtype: CtPacked(sym=False, dtype=dtype),
    "awq": lambda dtype: Awq(),
    "w8": lambda dtype: CtPacked(bits=8, dtype=dtype),
    "w3": lambda dtype: CtPacked(bits=3, dtype=dtype),
    "w2": lambda dtype: CtPacked(bits=2, group_size=64, sym=False, dtype=dtype),
    "nf4": lambda dtype: Nf4(dtype=dtype),
    "nf4-plain": lambda dtype: Nf4(double_quant=False, dtype=dtype),
    "fp4": lambda dtype: Fp4(dtype=dtype),
    "mxfp4": lambda dtype: CtMxfp4(dtype=dtype),
    "nvfp4": lambda dtype: CtNvfp4(dtype=dtype),
    "llm-int8": lambda dtype: LlmInt8(dtype=dtype),
    "w8a8": lambda dtype: CtInt8(dtype=dtype),
    "fp8": lambda dtype: CtFloat8(dtype=dtype),
    "fp8-block": lambda dtype: CtFloat8(strategy="block", dtype=dtype),
}
NAMES = (*FORMATS, UNQUANTIZED, ATTENTION)


@dataclass(frozen=True)
class Model:
    """The linear layers of one block as an engine fuses them, and its attention heads."""

    layers: dict[str, tuple[int, int]]  # name -> (outputs, inputs)
    heads: int
    kv_heads: int
    head_dim: int


def _model(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> Model:
    layers = {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    return Model(layers, heads, kv_heads, head_dim)


MODELS = {
    "llama-3.1-8b": _model(4096, 14336, 32, 8, 128),
    "llama-3.2-1b": _model(2048, 8192, 32, 8, 64),
    "qwen2.5-7b": _model(3584, 18944, 28, 4, 128),
}

# (batch, length): one new token a sequence over a cache of that length; whole prompts of that length.
DECODE = ((1, 1024), (1, 8192), (1, 32768), (8, 2048), (32, 1024), (32, 4096), (128, 1024), (256, 1024))
PREFILL = ((8, 1024), (1, 8192), (16, 2048))
DECODE_ON_CPU = ((1, 128), (4, 64))
PREFILL_ON_CPU = ((2, 48),)


@dataclass(frozen=True)
class LinearCase:
    """x [tokens, inputs] times a weight [outputs, inputs] in a format."""

    format: str
    layer: str
    outputs: int
    inputs: int
    tokens: int
    dtype: str

    what = "linear"

    @property
    def shape(self) -> str:
        return f"{self.outputs}x{self.inputs}"

    @property
    def name(self) -> str:
        return f"{self.format} {self.layer} M={self.tokens}"

    @property
    def fmt(self) -> Format | None:
        return FORMATS[self.format](self.dtype) if self.format in FORMATS else None

    @property
    def cold_bytes(self) -> int:
        """Of the weight: what its format stores for this shape."""
        if self.fmt is None:
            return 2 * self.outputs * self.inputs
        parts = self.fmt.parts((self.outputs, self.inputs)).values()
        return sum(part.dtype.itemsize * max(0, _count(part.shape)) for part in parts)

    @property
    def bytes(self) -> int:
        """The fewest that must move: the weight and x once, y once."""
        return self.cold_bytes + 2 * self.tokens * (self.inputs + self.outputs)

    @property
    def operations(self) -> int:
        return 2 * self.tokens * self.outputs * self.inputs

    @property
    def rate_factor(self) -> int:
        """How many times the 16-bit rate the matrix units reach: 8-bit products run at twice that."""
        return 2 if self.fmt is not None and self.fmt.input_rounding else 1


@dataclass(frozen=True)
class AttentionCase:
    """`decode`: one new token a sequence behind `length - 1` others; `prefill`: `length` new ones, causal."""

    kind: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str = "auto"  # as an engine is told; auto: as activations

    what = "attention"
    rate_factor = 1

    @property
    def cache(self) -> KvKind:
        return kv_kind(self.kv_dtype, getattr(torch, self.dtype))

    @property
    def format(self) -> str:
        return self.cache.label

    @property
    def layer(self) -> str:
        return f"{self.kind} {self.batch}x{self.length}"

    @property
    def shape(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def name(self) -> str:
        return f"attention {self.layer} {self.kv_dtype}".removesuffix(" auto")

    @property
    def new(self) -> int:
        """New tokens of a sequence."""
        return 1 if self.kind == "decode" else self.length

    @property
    def tokens(self) -> int:
        return self.batch * self.new

    @property
    def cold_bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.length * self.kv_heads * self.cache.token_bytes(self.head_dim)

    @property
    def bytes(self) -> int:
        return self.cold_bytes + 2 * 2 * self.tokens * self.heads * self.head_dim

    @property
    def operations(self) -> int:
        """Only what the causal mask lets through."""
        seen = self.length if self.kind == "decode" else self.length * (self.length + 1) // 2
        return 4 * self.batch * seen * self.heads * self.head_dim


Case = LinearCase | AttentionCase


def make_cases(
    formats: Sequence[str],
    shapes: Sequence[str],
    tokens: Sequence[int],
    dtype: str,
    kv_dtypes: Sequence[str] = ("auto",),
    *,
    on_gpu: bool,
) -> list[Case]:
    """Everything to measure, cases of one weight behind each other; InputError where a name or size is wrong."""
    if dtype not in DTYPES:
        raise InputError(f"dtype is '{dtype}', but must be {' or '.join(DTYPES)}")
    for kv_dtype in kv_dtypes:
        if kv_dtype not in KV_DTYPES:
            raise InputError(f"unknown kv-dtype '{kv_dtype}'; {did_you_mean(kv_dtype, KV_DTYPES)}")
    chosen = NAMES if "all" in formats else tuple(dict.fromkeys(formats))
    for name in chosen:
        if name not in NAMES:
            raise InputError(f"unknown format '{name}'; {did_you_mean(name, (*NAMES, 'all'))}")
    layers = [layer for shape in dict.fromkeys(shapes) for layer in _layers(shape)]
    if not tokens or min(tokens) < 1:
        raise InputError(f"numbers of tokens are {list(tokens)}, but must be 1 or more")
    cases: list[Case] = []
    for name in chosen:
        if name == ATTENTION:
            cases += _attention_cases(shapes, dtype, kv_dtypes, on_gpu)
            continue
        for (layer, outputs, inputs), count in itertools.product(layers, tokens):
            case = LinearCase(name, layer, outputs, inputs, count, dtype)
            _check(case)
            cases.append(case)
    return cases


def _check(case: LinearCase) -> None:
    try:
        if case.fmt is not None:
            case.fmt.check((case.outputs, case.inputs))
    except InputError as error:
        raise InputError(f"format '{case.format}' does not take layer {case.layer}: {error}") from error


def _layers(shape: str) -> list[tuple[str, int, int]]:
    """(name, outputs, inputs) of a model's layers, or of one given as OUTxIN."""
    if shape in MODELS:
        return [(layer, *size) for layer, size in MODELS[shape].layers.items()]
    if match := re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", shape):
        return [(shape, int(match[1]), int(match[2]))]
    raise InputError(f"unknown shape '{shape}', and not OUTxIN such as 4096x4096; {did_you_mean(shape, MODELS)}")


def _attention_cases(shapes: Sequence[str], dtype: str, kv_dtypes: Sequence[str], on_gpu: bool) -> list[AttentionCase]:
    """With the heads of the named models; of the first one known where only plain sizes are given."""
    models = [MODELS[shape] for shape in dict.fromkeys(shapes) if shape in MODELS] or [MODELS["llama-3.1-8b"]]
    decode, prefill = (DECODE, PREFILL) if on_gpu else (DECODE_ON_CPU, PREFILL_ON_CPU)
    sizes = [("decode", *size) for size in decode] + [("prefill", *size) for size in prefill]
    return [
        AttentionCase(kind, batch, length, model.heads, model.kv_heads, model.head_dim, dtype, kv_dtype)
        for model in models
        for kv_dtype in dict.fromkeys(kv_dtypes)
        for kind, batch, length in sizes
    ]


def _count(shape: tuple[int, ...]) -> int:
    """Elements; negative for a part of unknown length, which is a few bytes of text."""
    count = 1
    for size in shape:
        count *= size
    return count
