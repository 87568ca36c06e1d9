"""Weight formats: how quantized weights look, and nobody else packs a nibble. Start reading at `base.py`.

To add one: a file with a frozen `Format` dataclass, its name in a `Dialect.formats`, done. Recipes, the writer, the
loader, `convert` and `inspect` find it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quantkit.errors import CannotHold, InputError, did_you_mean
from quantkit.formats.awq import Awq, AwqDialect
from quantkit.formats.base import Dialect, Format, Index, Parts, PartSpec, QuantizedWeight, Shape, TensorInfo
from quantkit.formats.bitsandbytes import BitsAndBytesDialect
from quantkit.formats.bnb_4bit import Fp4, Nf4
from quantkit.formats.codebook import CodebookWeight
from quantkit.formats.compressed_tensors import CompressedTensorsDialect
from quantkit.formats.ct_float8 import CtFloat8, Float8Weight
from quantkit.formats.ct_integer import CtInt8, CtPacked
from quantkit.formats.engine_rules import Refusal
from quantkit.formats.gguf import Gguf, GgufDialect, GgufWeight
from quantkit.formats.gptq import Gptq, GptqDialect
from quantkit.formats.integer import IntegerFormat, IntegerWeight
from quantkit.formats.llm_int8 import AbsmaxInt8Weight, LlmInt8
from quantkit.formats.mxfp4 import BlockMxfp4, CtMxfp4, Mxfp4Dialect
from quantkit.formats.nvfp4 import CtNvfp4

DIALECTS: dict[str, Dialect] = {
    dialect.quant_method: dialect
    for dialect in (GptqDialect(), AwqDialect(), BitsAndBytesDialect(), CompressedTensorsDialect(), Mxfp4Dialect())
}
FORMATS: dict[str, type[Format]] = {fmt.name: fmt for dialect in DIALECTS.values() for fmt in dialect.formats}
RECIPE_FORMATS: dict[str, type[Format]] = FORMATS | {Gguf.name: Gguf}  # GGUF recipes write a file, not a folder


def options_of(name: str) -> tuple[str, ...]:
    """The options that a format of this name takes."""
    fields = dataclasses.fields(_class_of(name))  # type: ignore[arg-type]
    return tuple(field.name for field in fields if field.init)


def build(name: str, options: Mapping[str, Any], model_dtype: str) -> Format:
    """A format from its name and options, as a recipe gives them."""
    cls = _class_of(name)
    for option in options:
        if option not in options_of(name):
            raise InputError(f"format '{name}' has no option '{option}'; {did_you_mean(option, options_of(name))}")
    defaults = {"dtype": model_dtype} if cls.dtype_follows_model else {}
    return cls(**(defaults | dict(options)))


def dialect_of(modules: Mapping[str, Format]) -> Dialect:
    """The dialect that can describe all these modules in one checkpoint."""
    kinds = {type(fmt) for fmt in modules.values()}
    for dialect in (*DIALECTS.values(), GgufDialect()):
        if kinds <= set(dialect.formats):
            return dialect
    names = ", ".join(sorted(kind.name for kind in kinds))
    raise CannotHold(f"one checkpoint cannot mix the formats {names}; they belong to different libraries")


def dialect_with(name: str) -> Dialect:
    """The dialect that a format of this name belongs to."""
    return next(dialect for dialect in (*DIALECTS.values(), GgufDialect()) if _class_of(name) in dialect.formats)


def dialect_named(quant_method: str) -> Dialect:
    if quant_method not in DIALECTS:
        raise InputError(
            f"quantization method '{quant_method}' is not supported; {did_you_mean(quant_method, DIALECTS)}"
        )
    return DIALECTS[quant_method]


def _class_of(name: str) -> type[Format]:
    if name not in RECIPE_FORMATS:
        raise InputError(f"unknown format '{name}'; {did_you_mean(name, RECIPE_FORMATS)}")
    return RECIPE_FORMATS[name]


__all__ = [
    "DIALECTS",
    "FORMATS",
    "RECIPE_FORMATS",
    "AbsmaxInt8Weight",
    "Awq",
    "BlockMxfp4",
    "CodebookWeight",
    "CtFloat8",
    "CtInt8",
    "CtMxfp4",
    "CtNvfp4",
    "CtPacked",
    "Dialect",
    "Float8Weight",
    "Format",
    "Fp4",
    "Gguf",
    "GgufWeight",
    "Gptq",
    "Index",
    "IntegerFormat",
    "IntegerWeight",
    "LlmInt8",
    "Nf4",
    "PartSpec",
    "Parts",
    "QuantizedWeight",
    "Refusal",
    "Shape",
    "TensorInfo",
    "build",
    "dialect_named",
    "dialect_of",
    "dialect_with",
    "options_of",
]
