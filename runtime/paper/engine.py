"""An engine on paper: for a card that need not be here, on tensors without memory.

It is the engine that would run there: the same plan of memory, the same decoder, the same steps. Where that one reads
numbers from the device, this one reads zeros. What it launches can be listed (`launches.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.kv_choice import RankNeed, choose_kv_dtype
from quantkit.runtime.device.memory import weight_bytes
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.lm_head import more_bytes
from quantkit.runtime.paper.weights import META, paper_weights
from quantkit.runtime.startup import Stages, build_engine, generation_config
from quantkit.sources import model_folder


@dataclass(frozen=True, kw_only=True)
class PaperOptions(EngineOptions):
    """`device` is not asked for."""

    @property
    def torch_device(self) -> torch.device:
        return META


def paper_engine(model: str | Path, given: EngineOptions, available: int) -> Engine:
    """For the card that is pretended, of which quantkit may use so many bytes."""
    check_paper(given)
    more = {"warm_up": "none", "speculative": _verified(given)}
    options: EngineOptions = PaperOptions(**vars(given) | more)
    checkpoint = Checkpoint(model_folder(model))
    config = read_model_config(checkpoint.config, generation_config(checkpoint.folder))
    dtype = options.torch_dtype(checkpoint.dtype)
    size = weight_bytes(checkpoint, dtype, options.arithmetic) + more_bytes(config, dtype, options.head_bits)
    choice = choose_kv_dtype([RankNeed(config, size)], dtype, options, available)
    options = choice.settled(options)
    return build_engine(
        checkpoint.config, config, lambda: paper_weights(checkpoint, config, dtype, options), size, dtype, options,
        stages=Stages(), formats=checkpoint.formats, kv_choice=choice, available=available,
    )  # fmt: skip


def check_paper(given: EngineOptions) -> None:
    if given.tensor_parallel > 1 or given.pipeline_parallel > 1:
        raise InputError("kernels are listed for one GPU; leave --tensor-parallel and --pipeline-parallel out")


def _verified(given: EngineOptions) -> str | None:
    """Guesses from nowhere, as many as the drafter that is asked for makes: the target's own steps are listed."""
    asked = given.speculation
    return None if asked is None or asked.kind == "medusa" else f"ngram,k={asked.most}"
