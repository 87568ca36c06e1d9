"""Which type every matrix of a model gets: the mixes of llama.cpp, as its `llama-quantize` chooses with an importance
matrix. Layers at both ends and every third between have more bits where a mix says so.

A row that is no whole number of blocks gets the type of 32 numbers that llama.cpp falls back to, or 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.formats.gguf.types import TYPES

Role = Literal["embedding", "output", "q", "k", "v", "attention_output", "gate", "up", "down"]

# By a mix's name in recipes: the type of most matrices.
MIXES = {
    "q8_0": "Q8_0",
    "q6_k": "Q6_K",
    "q5_k_m": "Q5_K",
    "q4_k_m": "Q4_K",
    "q4_k_s": "Q4_K",
    "q4_0": "Q4_0",
    "iq4_xs": "IQ4_XS",
    "q3_k_m": "Q3_K",
    "q2_k": "Q2_K",
}
UNBLOCKED = "F16"  # what a row of no whole number of blocks becomes
_FALLBACKS = {"IQ4_XS": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYERS_OF_70B = 80


@dataclass(frozen=True)
class Matrix:
    """What a mix looks at."""

    role: Role  # fused queries, keys and values are a `v`; fused gate and up an `up`
    inputs: int
    layers: int  # of the model
    shared_heads: int  # query heads that read one key and value head
    layer: int = 0

    @property
    def has_more_bits(self) -> bool:
        eighth = self.layers // 8
        return self.layer < eighth or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2


def type_of(mix: str, matrix: Matrix) -> str:
    """The name of a matrix's type: one of TYPES, or F16."""
    wanted = _wanted(mix, matrix)
    if matrix.inputs % TYPES[wanted].size:
        wanted = _FALLBACKS.get(wanted, wanted)
    return UNBLOCKED if matrix.inputs % TYPES[wanted].size else wanted


def _wanted(mix: str, matrix: Matrix) -> str:
    usual = MIXES[mix]
    if matrix.role == "output":
        return "Q8_0" if usual == "Q8_0" or matrix.inputs % TYPES[usual].size else "Q6_K"
    if matrix.role == "v":
        return _of_values(mix, matrix, usual)
    if matrix.role == "down":
        return _of_down(mix, matrix, usual)
    if matrix.role == "attention_output":
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K"}.get(mix, usual)
    return usual


def _of_values(mix: str, matrix: Matrix, usual: str) -> str:
    wanted = usual
    if mix == "q2_k":
        wanted = "Q4_K" if matrix.shared_heads >= 4 else "Q3_K"
    elif mix == "q3_k_m":
        wanted = "Q5_K" if matrix.layer < 2 else "Q4_K"
    elif mix == "iq4_xs" and matrix.shared_heads >= 4:
        wanted = "Q5_K"
    elif mix in ("q4_k_m", "q5_k_m") and matrix.has_more_bits:
        wanted = "Q6_K"
    elif mix == "q4_k_s" and matrix.layer < 4:
        wanted = "Q5_K"
    large = matrix.layers == _LAYERS_OF_70B and matrix.shared_heads > 1
    return "Q5_K" if large and wanted in ("Q3_K", "Q4_K") else wanted


def _of_down(mix: str, matrix: Matrix, usual: str) -> str:
    first = matrix.layer < matrix.layers // 8
    if mix == "q2_k":
        return "Q3_K"
    if mix == "q3_k_m":
        return "Q5_K" if matrix.layer < matrix.layers // 16 else "Q4_K"
    if mix in ("q4_k_m", "q5_k_m") and matrix.has_more_bits:
        return "Q6_K"
    return {"q4_k_s": "Q5_K", "q4_0": "Q4_1"}.get(mix, usual) if first else usual
