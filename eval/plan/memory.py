"""What fits on a GPU beside the weights: the engine's own reserve, and how many requests the rest holds.

The formulas are those of `runtime/device/memory.py` with its defaults for a GPU, for GPUs that are not here; a test
keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from quantkit.eval.plan.gpus import Gpu
from quantkit.eval.plan.model import Cache, Decoder
from quantkit.eval.plan.weights import WeightPlan
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import expanded_latent_bytes
from quantkit.runtime.sampling.sampler import SHAPED_BYTES, TABLE_BYTES

SHARE = EngineOptions.memory_share  # of the GPU's memory
PAGE = EngineOptions.page_size  # tokens
STEP_TOKENS = 8192
SEQUENCES = 256  # at once, unless --max-sequences says another number
LIBRARIES = 512 << 20  # CUDA, cuBLAS, compiled kernels
_LOGITS_ROWS = 512  # at once, of prompts and to sample
_ACTIVATION = 2  # bytes of a number on its way through the model


@dataclass(frozen=True)
class Reserve:
    """Bytes that the engine keeps free for itself."""

    hidden: int  # activations of one step
    decoded: int  # one weight in 16 bit, for many tokens
    logits: int
    libraries: int
    graphs: int
    expanded: int = 0  # keys and values that prompts make of latents

    @property
    def total(self) -> int:
        return self.hidden + self.decoded + self.logits + self.libraries + self.graphs + self.expanded


@dataclass(frozen=True)
class Fit:
    """How one format of a model fits on one GPU."""

    gpu: str
    format: str
    available: int  # bytes that quantkit may use
    weights: int
    reserve: int
    page_bytes: int
    pages_per_request: int

    @property
    def cache(self) -> int:
        """Bytes left for the cache; negative where weights and reserve do not fit."""
        return self.available - self.weights - self.reserve

    @property
    def pages(self) -> int:
        """Of the cache, without the one that belongs to nobody."""
        return max(0, self.cache // self.page_bytes - 1)

    @property
    def tokens(self) -> int:
        return self.pages * PAGE

    @property
    def requests(self) -> int:
        return self.pages // self.pages_per_request


def reserve_of(decoder: Decoder, tensor: int = 1) -> Reserve:
    """Of a rank, one of so many that share every layer: logits of all of them are put together."""
    config = decoder.config
    logit = _ACTIVATION * (1 if tensor == 1 else 3) + SHAPED_BYTES
    width = max(3 * config.token_channels + config.routed_channels, config.attention_numbers) + 3 * config.hidden
    graph_width = 4 * config.token_channels + config.routed_channels + 4 * config.hidden + 4 * config.attended
    decoded = config.decoded_weights * _ACTIVATION
    return Reserve(
        hidden=STEP_TOKENS * width * _ACTIVATION,
        decoded=decoded,
        logits=(_LOGITS_ROWS * logit + SEQUENCES * TABLE_BYTES) * config.vocab,
        libraries=LIBRARIES,
        graphs=SEQUENCES * graph_width * _ACTIVATION * 4 + decoded + (64 << 20),
        expanded=expanded_latent_bytes(config, torch.bfloat16, None),
    )


def fit(gpu: Gpu, weights: WeightPlan, reserve: Reserve, cache: Cache, itemsize: Fraction, context: int) -> Fit:
    """The engine keeps every token in every layer, those outside a sliding window too."""
    return Fit(
        gpu=gpu.name,
        format=weights.name,
        available=int(gpu.memory * SHARE),
        weights=weights.bytes,
        reserve=reserve.total,
        page_bytes=int(cache.per_token * itemsize * PAGE),
        pages_per_request=-(-context // PAGE),
    )
