"""Activations as llama.cpp rounds them before it multiplies them with blocks: to 8 bits, a scale for a block of inputs.

256 inputs share a scale where the weight's blocks have 256 (its Q8_K), else 32 (its Q8_0 and Q8_1). With the same
rounding a model of decoded weights says whether llama.cpp reads a file as we do, and nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint import Checkpoint
from quantkit.formats import Gguf

_LARGE, _SMALL = 256, 32
_LEVELS = 127


def round_inputs(model: nn.Module, checkpoint: Checkpoint) -> None:
    """From now on the linears of a model see rounded inputs, each by the type of its weight in a GGUF file."""
    formats = dict(checkpoint.formats)
    if "lm_head" not in formats and "model.embed_tokens" in formats:  # one matrix for both
        formats["lm_head"] = formats["model.embed_tokens"]
    for name, module in model.named_modules():
        fmt = formats.get(name)
        if isinstance(module, nn.Linear) and isinstance(fmt, Gguf):
            module.register_forward_pre_hook(partial(_round_first, block=block_of(fmt)))


def _round_first(module: nn.Module, given: tuple[Any, ...], block: int) -> tuple[Any, ...]:
    return rounded(given[0], block), *given[1:]


def block_of(fmt: Gguf) -> int:
    """Inputs that share a scale."""
    return _LARGE if fmt.kind.endswith("_K") or fmt.kind == "IQ4_XS" else _SMALL


def rounded(x: Tensor, block: int) -> Tensor:
    parts = x.float().unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True) / _LEVELS
    if block == _SMALL:
        scale = scale.half().float()  # as its blocks have it
    return torch.where(scale > 0, (parts / scale).round() * scale, torch.zeros_like(parts)).flatten(-2).to(x.dtype)
