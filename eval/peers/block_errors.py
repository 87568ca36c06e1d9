"""Weighted errors of blocks, ours beside those of llama-quantize with the same importance:

llama-imatrix -m demo-f32.gguf -f calibration.txt -o imatrix.gguf -c 512
llama-quantize --pure --imatrix imatrix.gguf demo-f32.gguf pure-Q4_K.gguf Q4_K
python -m quantkit.eval.peers.block_errors demo-f32.gguf imatrix.gguf pure-Q4_K.gguf ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from quantkit.formats import Gguf

_LAYERS, _PARTS = (0, 3), ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")
_NAMES = tuple(f"blk.{layer}.{part}.weight" for layer in _LAYERS for part in _PARTS)


def decoded(file: Path) -> dict[str, tuple[str, Tensor]]:
    """Type and numbers of the matrices that are compared."""
    tensors = [tensor for tensor in GGUFReader(file).tensors if tensor.name in _NAMES]
    return {
        tensor.name: (tensor.tensor_type.name, torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))))
        for tensor in tensors
    }


def importance_in(file: Path) -> dict[str, Tensor]:
    """Of every matrix, [in], with mean 1."""
    sums = {tensor.name: torch.from_numpy(np.array(tensor.data)).flatten() for tensor in GGUFReader(file).tensors}
    return {name: sums[f"{name}.in_sum2"] / sums[f"{name}.in_sum2"].mean() for name in _NAMES}


def weighted_error(found: Tensor, weight: Tensor, importance: Tensor) -> float:
    return float(((found - weight).square() * importance).sum() / (weight.square() * importance).sum())


def main(source: Path, matrix: Path, files: list[Path]) -> None:
    weights, importance = decoded(source), importance_in(matrix)
    for file in files:
        ours, theirs, kind = 0.0, 0.0, ""
        for name, (kind, found) in decoded(file).items():
            weight, matter = weights[name][1], importance[name]
            theirs += weighted_error(found, weight, matter)
            ours += weighted_error(Gguf(kind).search(weight, matter).dequantize(), weight, matter)
        print(f"{kind}: ours {ours / len(_NAMES):.4e}, theirs {theirs / len(_NAMES):.4e}, ratio {ours / theirs:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
