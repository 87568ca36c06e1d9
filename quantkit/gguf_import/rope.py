"""Rotary position settings: from GGUF metadata and the `rope_freqs` table to the `rope_parameters` of transformers.

Llama 3.1 and later stretch their slow frequencies. transformers keeps four numbers and a formula; a GGUF file keeps the
result, a divisor per frequency in the tensor `rope_freqs.weight`. The numbers are recovered from the divisors:

    wavelength < original / high                    divisor 1
    wavelength > original / low                     divisor `factor`
    between, s = (original / wavelength - low) / (high - low)      1 / divisor = (1 - s) / factor + s
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.gguf_import.reader import GgufFile

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)  # tensors that are settings, not weights
_PARTIAL = ("phi3",)  # whose heads may be rotated in part
Vector = NDArray[np.float64]


def rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and what the type needs. Refuses what the family cannot compute."""
    prefix = f"{file.architecture}.rope"
    rotated = file.find(f"{prefix}.dimension_count", int) or head_dim
    partial = {}
    if rotated != head_dim:
        if file.architecture not in _PARTIAL or not 0 < rotated < head_dim:
            raise InputError(
                f"{file.path} rotates {rotated} of {head_dim} dimensions per head; only whole heads are supported"
            )
        partial = {"partial_rotary_factor": rotated / head_dim}
    theta = file.number(f"{prefix}.freq_base") or 10000.0
    long = LONG_FACTORS in file.tensors
    scaling = _long_factors(file, rotated) if long else _scaling(file, f"{prefix}.scaling")
    if ROPE_FREQS in file.tensors:
        scaling = _from_table(file, theta, head_dim, scaling)
    return {"rope_type": "default", "rope_theta": theta, **partial, **scaling}


def _long_factors(file: GgufFile, rotated: int) -> dict[str, Any]:
    """Phi-3's tables, one for texts up to the original context and one for longer ones."""
    factors = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    found: dict[str, Any] = {"rope_type": "longrope"}
    for key, name in factors.items():
        if file.shape(name) != (rotated // 2,):
            raise InputError(f"{file.path}: {name} must hold {rotated // 2} numbers; get the file again")
        tensor = file.tensors[name]
        numbers = dequantize(tensor.data, tensor.tensor_type).ravel()
        found[key] = [float(str(np.float32(number))) for number in numbers]
    original = file.need(f"{file.architecture}.rope.scaling.original_context_length", int)
    found["original_max_position_embeddings"] = original
    attention = file.number(f"{file.architecture}.rope.scaling.attn_factor")
    return found if attention is None else {**found, "attention_factor": attention}


def _scaling(file: GgufFile, prefix: str) -> dict[str, Any]:
    """What the metadata says about a longer context."""
    kind = file.find(f"{prefix}.type", str) or "linear"
    factor = file.number(f"{prefix}.factor") or file.number(f"{file.architecture}.rope.scale_linear")
    if kind == "none" or factor in (None, 1.0):
        return {}
    assert factor is not None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise InputError(f"{file.path}: rope scaling '{kind}' is not supported; supported: none, linear, yarn")
    original = file.need(f"{prefix}.original_context_length", int)
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    attention = file.number(f"{prefix}.attn_factor") or file.number(f"{prefix}.yarn_attn_factor")
    if attention is not None:  # GGUF multiplies what transformers computes by default
        yarn["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        value = file.number(f"{prefix}.yarn_{name}")
        if value is not None:
            yarn[name] = value
    return yarn


def _from_table(file: GgufFile, theta: float, head_dim: int, scaling: dict[str, Any]) -> dict[str, Any]:
    """The llama3 scaling whose divisors are those of the table."""
    tensor = file.tensors[ROPE_FREQS]
    divisors = dequantize(tensor.data, tensor.tensor_type).astype(np.float64).ravel()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if divisors.shape != wavelengths.shape or not bool((divisors > 0).all()):
        raise InputError(f"{file.path}: {ROPE_FREQS} must hold {head_dim // 2} positive numbers; get the file again")
    if np.allclose(divisors, 1.0):
        return scaling
    original = file.find(f"{file.architecture}.rope.scaling.original_context_length", int) or 8192
    factor = float(str(np.float32(divisors.max())))
    for low, high, context in ((1.0, 4.0, float(original)), _fitted(divisors, wavelengths, factor)):
        if high > low and np.allclose(llama3_divisors(wavelengths, factor, low, high, context), divisors, rtol=1e-3):
            llama3 = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return {**llama3, "original_max_position_embeddings": round(context)}
    raise InputError(
        f"{file.path}: the frequencies in {ROPE_FREQS} are not those of any Llama 3 scaling; not supported"
    )


def llama3_divisors(wavelengths: Vector, factor: float, low: float, high: float, original: float) -> Vector:
    """The table that belongs to a scaling: the formula at the top of this file."""
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth), dtype=np.float64)


def _fitted(divisors: Vector, wavelengths: Vector, factor: float) -> tuple[float, float, float]:
    """(low, high, original) from the frequencies in between, where s is a line over 1 / wavelength.

    The three have a common scale that the table does not show; `low` is set to 1, as in every published model.
    """
    smooth = (1.0 / divisors - 1.0 / factor) / (1.0 - 1.0 / factor)
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if int(between.sum()) < 2:
        return 1.0, 1.0, 0.0
    slope, offset = np.polyfit(1.0 / wavelengths[between], smooth[between], 1)
    high = 1.0 - 1.0 / float(offset)
    return 1.0, high, float(slope) * (high - 1.0)
