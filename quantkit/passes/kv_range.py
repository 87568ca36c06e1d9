"""How large keys and values get: what the scales of an FP8 cache are made from.

The model runs block by block on calibration tokens, quantized as it will be served, and attention is given something in
place of a cache: keys come there after rope, whole, as other engines keep them. Our own takes their centres away first
and makes the scales larger by what that may add (`runtime/device/key_centres.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantkit.arch import Config, Family
from quantkit.blocks import BlockRunner, run_block
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.errors import InputError
from quantkit.formats.kv_scheme import scale_tensors
from quantkit.methods.arithmetic import fast_products
from quantkit.passes.activations import Activations, choose_place
from quantkit.progress import Progress, silent


class _Range:
    """Stands in for a layer's cache: remembers the largest magnitude of each head, and keeps nothing else."""

    def __init__(self) -> None:
        self.largest: list[Tensor] = []  # [2, kv_heads] of each batch

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Both [batch, kv_heads, tokens, head_dim], as transformers' attention gives them to its cache."""
        self.largest.append(torch.stack([part.abs().amax(dim=(0, 2, 3)).float() for part in (keys, values)]))
        return keys, values


def check_kv_range(family: Family, config: Config) -> None:
    """Refuses attention that keeps no keys and values."""
    if any(stage.role == "kv_b" for stage in family.stages(0, config)):
        raise InputError(
            f"the family '{family.model_type}' keeps latents instead of keys and values, which have no scales; "
            "leave kv_scales out"
        )


@torch.no_grad()
def measure_kv_scales(
    checkpoint: Checkpoint,
    family: Family,
    tokens: Tensor,
    strategy: str,
    device: str,
    scratch: Path,
    on_block: Progress = silent,
) -> dict[str, Tensor]:
    """The scales' tensors by their names, from calibration tokens [samples, length]; `scratch` is for activations that
    do not fit into memory."""
    runner = BlockRunner(checkpoint, family, device)
    size = tokens.numel() * int(checkpoint.config["hidden_size"]) * runner.dtype.itemsize
    hidden = Activations(runner.device, choose_place(size, runner.device), scratch, "kv-range")
    for part in tokens.split(max(1, runner.batch_tokens // tokens.shape[1])):
        hidden.append(runner.embed(part))
    scales: dict[str, Tensor] = {}
    for layer, arguments in enumerate(runner.arguments(tokens.shape[1])):
        seen = _Range()
        parts = runner.load(layer, arguments | {"past_key_values": seen})
        with fast_products(runner.device):
            for index, batch in enumerate(hidden):
                hidden[index] = run_block(parts, batch)
        runner.free(layer)
        attention = f"{family.blocks}.{layer}.{parts[0].part.body}"
        largest = torch.stack(seen.largest).amax(0).cpu()
        require_finite(f"keys and values of {attention}", largest)
        scales |= scale_tensors(attention, largest, strategy)
        on_block(attention, len(runner))
    return scales
