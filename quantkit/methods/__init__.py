"""Quantization methods: the mathematics that turns the weight of a layer into the codes of a format, one file each.

    rtn          round each weight to the nearest value of its format; needs no data, works with every format
    gptq         round column by column, later columns make up for earlier errors; integer formats
    awq          scale salient input columns up before rounding, fold the scales into the layer before; integer formats
    best         for each block awq, gptq or both, whichever errs least on sequences held back; integer formats
    block-search search the scales of GGUF blocks by importance, round by GPTQ on their grid; format gguf
    smoothquant  move activation outliers into the weights, for formats that quantize both
    tuned        learn the rounding of a whole block by gradients, from what `best` gives; integer formats

All but rtn need calibration data. A method neither reads nor writes files and knows no model: it sees the layers that
share one input, or a whole block, and a `Format`. `method.py` says what it may be asked. To add one: a file with a
frozen dataclass of its options, a subclass of `Method`; here, in a package of its own, or in a script (`registry.py`).
"""

from __future__ import annotations

from quantkit.methods.method import Method, needs_data
from quantkit.methods.registry import METHODS, find_method, method_names, package_of, register

__all__ = ["METHODS", "Method", "find_method", "method_names", "needs_data", "package_of", "register"]
