"""Weights without numbers: what a loader brings onto a GPU, as tensors that have shapes and places and no memory.

What the kernels of a layer are depends on little of its data: whether columns were reordered, whether zero points
differ. So the quantized layers of one block of each kind are read and laid out as for the GPU, and stand for the others
of their kind; plain tensors are not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.formats import Format, Index, QuantizedWeight
from quantkit.kernels.card import card_of
from quantkit.kernels.linear.arithmetic import with_exact_inputs
from quantkit.kernels.linear.decoded import DecodedWeight, why_card_decodes
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.grouped.stacks import lay_out
from quantkit.kernels.linear.op import LinearWeight, linear, prepare
from quantkit.kernels.linear.weight_only.float8 import Float8Steps
from quantkit.kernels.linear.weight_only.weight import PackedWeight
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.kv_scales import read_kv_scales
from quantkit.runtime.model.layers import Block, Weights
from quantkit.runtime.model.loading import ENDS, load_block, load_ends
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.reader import Reader

META = torch.device("meta")
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class PaperReader(Reader):
    """Reads quantized layers, and tries them as a loader does, whatever comes out; of other tensors, shapes."""

    def fill(
        self,
        place: Tensor,
        name: str,
        shape: tuple[int, ...],
        outputs: Index | None = None,
        inputs: Index | None = None,
    ) -> None:
        """There is nothing to fill."""

    def quantized(self, name: str) -> QuantizedWeight:
        """Copies, as on a GPU: each part begins in memory of its own."""
        return self.checkpoint.quantized(name, _HOST, copies=True)

    def prepared(self, name: str, fmt: Format, quantized: QuantizedWeight) -> LinearWeight:
        weight = prepare(fmt, quantized, self.dtype, self.arithmetic)
        self._try(weight)
        if isinstance(weight, Float8Steps):
            self._try(weight, weight.fewest_tokens(card_of(self.device)))
        return weight

    def plane(self, name: str, outputs: int, inputs: int) -> PackedWeight | EightBitWeight:
        fmt, quantized = with_exact_inputs(self.checkpoint.formats[name]), self.quantized(name)
        weight = lay_out(fmt, quantized)
        why_not = why_card_decodes(fmt, card_of(self.device))
        self._try(weight if why_not is None else DecodedWeight(fmt, quantized, why_not))
        return weight

    def _try(self, weight: LinearWeight, tokens: int = 1) -> None:
        linear(torch.empty(tokens, weight.inputs, dtype=self.dtype, device=META), without_data(weight))


def paper_weights(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> Weights:
    """Of a whole model, for one GPU; the card is pretended already."""
    ends = PaperReader(checkpoint, config, dtype, META, arithmetic=ENDS)
    embedding, head = load_ends(ends, Ranks(), options.head_bits)
    reader = PaperReader(checkpoint, config, dtype, META, arithmetic=options.arithmetic)
    kinds: dict[object, Block] = {}
    blocks = []
    for layer in range(config.layers):
        kind = _kind_of_block(checkpoint, config, layer)
        if kind not in kinds:
            with checkpoint.kept_open():
                kinds[kind] = without_data(load_block(reader, layer))
        blocks.append(kinds[kind])
    scales = read_kv_scales(checkpoint, config, META) if options.kv_dtype == "fp8" else None
    norm = reader.tensor("model.norm.weight", (config.hidden,))
    return Weights(without_data(embedding), tuple(blocks), norm, without_data(head), scales)


def _kind_of_block(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> object:
    """Blocks that are alike in this have the same tensors in the same formats."""
    prefix = f"{config.family.blocks}.{layer}."
    tensors = {
        name.removeprefix(prefix): (stored.info.dtype, stored.info.shape)
        for name, stored in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    formats = {
        name.removeprefix(prefix): fmt for name, fmt in checkpoint.formats.items() if name.startswith(prefix)
    }  # fmt: skip
    return repr((sorted(tensors.items()), sorted(formats.items(), key=lambda one: one[0])))


def without_data(value: Any) -> Any:
    """The same with tensors that have no memory, each as far from the beginning of its storage as it was."""
    if isinstance(value, Tensor):
        return value if value.is_meta else _empty_like(value)
    if isinstance(value, tuple):
        return tuple(map(without_data, value))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: without_data(getattr(value, field.name)) for field in fields(value) if field.init}
        return replace(value, **changed)
    return value


def _empty_like(tensor: Tensor) -> Tensor:
    storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=META)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
