"""What the runtime would do with a checkpoint on a GPU that need not be here. Headers are read, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.eval.plan.gpus import Gpu, find_card, find_gpu
from quantkit.formats import Format
from quantkit.kernels.card import Card
from quantkit.kernels.linear.eight_bit.weight import takes
from quantkit.kernels.linear.op import why_decoded
from quantkit.runtime.core.options import EngineOptions, dtype_on_gpu
from quantkit.runtime.device.build import check_attention
from quantkit.runtime.device.card_plan import CardPlan, plan_card, small_kv_dtype
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.expert_stacks import formats_of_layers, slow_experts
from quantkit.sources import model_folder
from quantkit.wording import human_bytes

_ROWS = 128  # outputs of a layer that stands for others of its format: what kernels take depends on inputs only


@dataclass(frozen=True)
class OnGpu:
    """One checkpoint on one GPU that the runtime does not refuse."""

    model: str
    gpu: Gpu
    plan: CardPlan
    kernels: Mapping[str, str]  # scheme -> what multiplies it
    weights: int  # bytes
    small_kv_dtype: str | None  # of `--kv-dtype auto`, where contexts do not fit in 16 bits

    @property
    def title(self) -> str:
        return f"On one {self.gpu.title}, compute capability {_version(self.plan.card)}"

    def rows(self) -> list[tuple[str, str]]:
        """What is asked, and the answer, for people."""
        plan = self.plan
        defaults = "no: the card's defaults are taken; `quantkit bench kernels --tune` on it makes a table"
        fits = "" if self.weights < self.gpu.memory else ", which is not enough"
        return [
            *self.kernels.items(),
            ("Hopper's own kernels", "yes" if plan.has_hopper_kernels else "no: Triton's do the same"),
            ("measured kernels", "yes" if plan.is_measured else defaults),
            ("FP8 cache", "yes" if plan.has_fp8_cache else "no (needs 8.9)"),
            ("--kv-dtype auto", self._auto),
            ("weights", f"need {human_bytes(self.weights)} of {human_bytes(self.gpu.memory)}{fits}"),
        ]

    @property
    def _auto(self) -> str:
        if self.small_kv_dtype is None:
            return "16 bits always"
        return f"16 bits; {self.small_kv_dtype} where the contexts that were asked for do not fit"

    def footer(self) -> str:
        more = f"`quantkit plan {self.model} --gpu {self.gpu.name}` says how many requests fit, and how fast they are."
        return "\n".join([*self.plan.warnings, more])

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.gpu.name,
            "title": self.gpu.title,
            "capability": _version(self.plan.card),
            "processors": self.plan.card.processors,
            "kernels": dict(self.kernels),
            "hopper_kernels": self.plan.has_hopper_kernels,
            "measured_kernels": self.plan.is_measured,
            "fp8_cache": self.plan.has_fp8_cache,
            "small_kv_dtype": self.small_kv_dtype,
            "weight_bytes": self.weights,
            "memory_bytes": self.gpu.memory,
            "warnings": list(self.plan.warnings),
        }


def look_on_gpu(model: str | Path, gpu: str) -> OnGpu:
    """Refuses GPUs that are unknown, too old or not NVIDIA's, and models that run on none, as an engine there would."""
    card = find_card(gpu)
    checkpoint = Checkpoint(model_folder(model))
    known = checkpoint.config.get("model_type") in FAMILIES  # others can still be looked at
    config = read_model_config(checkpoint.config) if known else None
    formats, dtype = checkpoint.formats, dtype_on_gpu(checkpoint.dtype)
    layers = list(formats.values()) if config is None else formats_of_layers(config, formats)
    slow = [] if config is None else slow_experts(config, formats)
    plan = plan_card(card, layers, slow_experts=slow)
    if config is not None and config.latent is not None:
        check_attention(config, EngineOptions().page_size, dtype)
    weights = weight_bytes(checkpoint, dtype)
    small = small_kv_dtype(card, (2, 1, 2) if config is None else config.cache_entry)
    return OnGpu(str(model), find_gpu(gpu), plan, _kernels(checkpoint, card), weights, small)


def _kernels(checkpoint: Checkpoint, card: Card) -> dict[str, str]:
    """For every scheme; where its layers differ, what is true of the first comes first."""
    kinds = {(fmt, checkpoint.layer_shape(module)[1]): None for module, fmt in checkpoint.formats.items()}
    found: dict[str, dict[str, None]] = {}
    for fmt, inputs in kinds:
        found.setdefault(f"{fmt.name} {fmt.describe()}", {})[_kernel(fmt, inputs, card)] = None
    return {scheme: "; ".join(answers) for scheme, answers in found.items()} or {"16-bit layers": "16-bit kernels"}


def _kernel(fmt: Format, inputs: int, card: Card) -> str:
    """Asked of a layer of ones: act-order, which only the weights know, may still stand in the way."""
    why_not = why_decoded(fmt, fmt.example((_ROWS, inputs)), card)
    if why_not:
        return f"decoded in every step: {why_not}"
    return "8-bit kernels" if takes(fmt) else "weight-only kernels"


def _version(card: Card) -> str:
    return f"{card.capability[0]}.{card.capability[1]}"
