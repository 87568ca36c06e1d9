"""How large keys and values get, and which scales suit them: what those of an FP8 cache are made from.

The model runs block by block on calibration tokens, quantized as it will be served, and attention is given something in
place of a cache: keys come there after rope, as an engine keeps them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantkit.arch import Config, Family
from quantkit.blocks import BATCH_TOKENS, BlockRunner, run_block
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.errors import InputError
from quantkit.formats.kv_scheme import STEPS, KvRange, scale_tensors
from quantkit.methods.arithmetic import fast_products
from quantkit.passes.activations import Activations, choose_place
from quantkit.progress import Progress, silent


class _Watched:
    """Stands in for a layer's cache: remembers what scales follow from, and keeps nothing else."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []  # [2, kv_heads] of each batch
        self._errors: list[Tensor] = []  # [2, kv_heads, STEPS]

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Both [batch, kv_heads, tokens, head_dim], as transformers' attention gives them to its cache."""
        both = torch.stack([keys, values]).float()
        self._largest.append(both.abs().amax(dim=(1, 3, 4)))
        self._errors.append(torch.stack([_error(both, step) for step in range(STEPS)], -1))
        return keys, values

    @property
    def range(self) -> KvRange:
        return KvRange(torch.stack(self._largest).amax(0).cpu(), torch.stack(self._errors).sum(0).cpu())


def _error(values: Tensor, step: int) -> Tensor:
    """Squares of what rounding to the digits of float8_e4m3fn costs each head, for scales 2 ** (n + step / STEPS).

    Its exponents do not matter here, so n does not: few values are so small that they have fewer digits.
    """
    scaled = values * 2.0 ** (-step / STEPS)
    bits = scaled.view(torch.int32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF  # to nearest even, three digits after the first
    return (rounded.view(torch.float32) - scaled).square().sum(dim=(1, 3, 4)) * 4.0 ** (step / STEPS)


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
    for part in tokens.split(max(1, BATCH_TOKENS // tokens.shape[1])):
        hidden.append(runner.embed(part))
    scales: dict[str, Tensor] = {}
    for layer, arguments in enumerate(runner.arguments(tokens.shape[1])):
        watched = _Watched()
        parts = runner.load(layer, arguments | {"past_key_values": watched})
        with fast_products(runner.device):
            for index, batch in enumerate(hidden):
                hidden[index] = run_block(parts, batch)
        runner.free(layer)
        attention = f"{family.blocks}.{layer}.{parts[0].part.body}"
        require_finite(f"keys and values of {attention}", watched.range.largest)
        scales |= scale_tensors(attention, watched.range, strategy)
        on_block(attention, len(runner))
    return scales
