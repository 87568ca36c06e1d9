"""The model as its own draft, in a format with fewer bits: quantized by rounding while it is read, kept nowhere.

Embedding, head and norms are the target's own; only the linear layers exist twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from quantkit.arch import family_of
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Format, QuantizedWeight
from quantkit.formats.base import ANY_LENGTH
from quantkit.runtime.drafters.draft_model import DraftModel
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.layers import Weights
from quantkit.runtime.model.loading import load_blocks


def make_self_draft(
    target: Checkpoint, config: ModelConfig, recipe: str, dtype: torch.dtype, device: torch.device
) -> DraftModel:
    """`recipe` is one that needs no calibration."""
    from quantkit.recipe import list_recipes, load_recipe  # needs pydantic, which a bare GPU image lacks

    chosen = load_recipe(recipe)
    if chosen.needs_data:
        ready = ", ".join(one.name for one in list_recipes() if not one.needs_data)
        raise InputError(
            f"speculative is 'self={recipe}', but '{recipe}' needs calibration, and such a draft is made while the "
            f"model loads; use one of {ready}, or quantize the model and give draft=PATH"
        )
    plan = chosen.plan(family_of(target.config), target.config, target.dtype)
    formats = {module: fmt for module, fmt in plan.items() if fmt is not None}
    method = chosen.method.build()
    rounded = _Rounded(target, formats, lambda weight, fmt: method.round_without_data(weight, fmt).quantized)

    def load(whole: Weights, kv_dtype: str) -> Weights:
        return replace(whole, blocks=load_blocks(rounded, config, dtype, device))

    return DraftModel(raw=target.config, config=config, load=load, size=rounded.nbytes(config, dtype))


class _Rounded(Checkpoint):
    """A checkpoint whose linear layers are quantized when they are read, whatever they were."""

    def __init__(
        self,
        whole: Checkpoint,
        formats: Mapping[str, Format],
        round_weight: Callable[[torch.Tensor, Format], QuantizedWeight],
    ) -> None:
        self.folder = whole.folder
        self.config = whole.config
        self.tensors, self.gguf = whole.tensors, whole.gguf
        self._whole, self._round = whole, round_weight
        self.__dict__["formats"] = dict(formats)  # instead of those that the files are in

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        with self._whole.kept_open():
            yield

    def quantized(self, module: str, device: str | torch.device = "cpu", *, copies: bool = False) -> QuantizedWeight:
        """New tensors in any case."""
        if module in self._whole.formats:
            weight = self._whole.weight(module, torch.float32, device)
        else:
            weight = self._whole.tensor(f"{module}.weight").to(device).float()
        return self._round(weight, self.formats[module])

    def nbytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Of the layers that exist twice."""
        total, decoded = 0, set(config.family.decoded_at_load(self.config))
        for layer, stages in enumerate(config.stages):
            for stage in stages:
                for module, rows in zip(config.family.modules(layer, stage), config.outputs(stage), strict=True):
                    fmt = self.formats.get(module)
                    if fmt is not None and module in decoded:
                        total += rows * config.inputs(stage) * dtype.itemsize
                        continue
                    parts = {} if fmt is None else fmt.parts((rows, config.inputs(stage)))
                    total += sum(
                        part.dtype.itemsize * torch.Size(part.shape).numel()
                        for part in parts.values()
                        if ANY_LENGTH not in part.shape
                    )
        return total
