"""Weight-only layers joined along their outputs: see `fuse.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.kernels.linear.fuse import same
from quantkit.kernels.linear.weight_only.weight import Nested, PackedWeight


def join_packed(weights: Sequence[PackedWeight]) -> PackedWeight | None:
    first = weights[0]
    if any(_meaning(weight) != _meaning(first) or not same(weight.order, first.order) for weight in weights):
        return None
    nested = None
    if first.nested is not None:
        nested = _join_nested(weights)
        if nested is None:
            return None
    return replace(
        first,
        outputs=sum(weight.outputs for weight in weights),
        words=torch.cat([weight.words for weight in weights], 1),
        high=_cat([weight.high for weight in weights]),
        scales=_cat([weight.scales for weight in weights]),
        zeros=_cat([weight.zeros for weight in weights]),
        nested=nested,
    )


def _meaning(weight: PackedWeight) -> tuple[object, ...]:
    """What a kernel is compiled for, and the dtype of scales."""
    scales = None if weight.scales is None else weight.scales.dtype
    return weight.inputs, scales, tuple(weight.constants().items()), weight.high is None


def _join_nested(weights: Sequence[PackedWeight]) -> Nested | None:
    """Second-level scales count blocks over all outputs, so each layer but the last must have whole ones."""
    parts: list[Nested] = [weight.nested for weight in weights if weight.nested is not None]
    blocks = [weight.outputs * (weight.inputs // weight.group) for weight in weights]
    every = parts[0].every
    bits = [part.table.view(torch.int32) for part in parts]  # E4M3 has entries that are no numbers, equal to nothing
    same_table = all(torch.equal(each, bits[0]) for each in bits)
    if not same_table or any(count % every for count in blocks[:-1]):
        return None
    kept = [part.scales[: count // every] for part, count in zip(parts[:-1], blocks[:-1], strict=True)]
    return Nested(
        codes=torch.cat([part.codes for part in parts], 1),
        table=parts[0].table,
        scales=torch.cat([*kept, parts[-1].scales]),
        offsets=torch.cat([part.offsets for part in parts]),
        every=every,
    )


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Outputs are the second dimension of everything that kernels read."""
    given = [part for part in parts if part is not None]
    return torch.cat(given, 1) if given else None
