"""Cache, tables, decoder and device rows around loaded weights: what a process needs to compute its part of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quantkit.arch import Config
from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.kernels.card import runs_kernels
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.arithmetic import takes_float8
from quantkit.runtime.core.kv_dtypes import kv_kind
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.card_plan import CardPlan, plan_card
from quantkit.runtime.device.decode_graphs import StepGraphs
from quantkit.runtime.device.device_rows import DeviceRows
from quantkit.runtime.device.kv_cache import allocate_cache
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.device.model_part import ModelPart
from quantkit.runtime.device.peers import Alone, Peers
from quantkit.runtime.device.prompt_graphs import PromptGraphs
from quantkit.runtime.device.step_tapes import StepTapes
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.decoder import Decoder
from quantkit.runtime.model.expert_stacks import formats_of_layers, slow_experts
from quantkit.runtime.model.layers import Weights
from quantkit.runtime.model.ops import ops_for
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.rope import rope_tables
from quantkit.runtime.model.tensor_group import Group, OneRank


def make_part(
    raw: Config,
    config: ModelConfig,
    weights: Weights,
    plan: MemoryPlan,
    dtype: torch.dtype,
    options: EngineOptions,
    *,
    group: Group = OneRank(),  # noqa: B008  (has no state)
    ranks: Ranks = Ranks(),  # noqa: B008
    peers: Peers = Alone(),  # noqa: B008
) -> ModelPart:
    """`config` is this rank's own. `peers` are told when it captures a graph; ranks that are told themselves have none.

    A step is a CUDA graph, on a CPU a tape, where one can hold all of it: not where it goes through several stages.
    """
    cache = allocate_cache(config, plan, dtype, options, weights.kv_scales)
    decoder = make_decoder(raw, config, weights, plan.max_context, dtype, options, group, ranks)
    device_rows = DeviceRows(options.sequences, plan.max_context, plan.page_size, options.torch_device, group)
    staged = ranks.pipeline > 1
    graphs = prompts = tapes = None
    if runs_kernels(options.torch_device) and options.graphs and not staged:
        graphs = StepGraphs(decoder, cache, device_rows, peers)
        if ranks == Ranks():  # others would have to make the same graphs at the same time
            prompts = PromptGraphs(decoder, cache, device_rows, graphs.pool)
    if options.graphs and not runs_kernels(options.torch_device) and ranks == Ranks() and installed.can_compile():
        tapes = StepTapes(decoder, cache, device_rows.page_table.shape[1])
    return ModelPart(decoder, cache, device_rows, graphs, prompts, tapes, timed=staged, host_bytes=options.host_bytes)


def make_decoder(
    raw: Config,
    config: ModelConfig,
    weights: Weights,
    max_context: int,
    dtype: torch.dtype,
    options: EngineOptions,
    group: Group = OneRank(),  # noqa: B008
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Decoder:
    device = options.torch_device
    tables = rope_tables(raw, config, max_context, device)
    return Decoder(config, weights, tables, ops_for(device, dtype), attention_scratch(config, options), group, ranks)


def attention_scratch(config: ModelConfig, options: EngineOptions) -> Any:
    if not runs_kernels(options.torch_device):
        return None
    from quantkit.kernels.attention.attend import make_scratch
    from quantkit.kernels.attention.latent.attend import make_latent_scratch

    if config.latent is not None:
        return make_latent_scratch(options.torch_device, config.latent.rank)
    return make_scratch(
        options.torch_device,
        sequences=options.sequences + 1,  # prompts have one more in their graphs
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_queries=options.budget,
    )


def check_kernels(
    config: ModelConfig, dtype: torch.dtype, options: EngineOptions, formats: Mapping[str, Format] | None = None
) -> CardPlan | None:
    """Refuses what this GPU, or attention, has no kernel for, before anything is loaded; None on a CPU.

    `formats`: of quantized layers, by module.
    """
    if formats is not None:
        check_arithmetic(options.arithmetic, formats_of_layers(config, formats))
    if not runs_kernels(options.torch_device):
        return None
    from quantkit.kernels.card import card_of

    formats = formats or {}
    slow = slow_experts(config, formats)
    layers = formats_of_layers(config, formats)
    card = card_of(options.torch_device)
    plan = plan_card(card, layers, options.kv_dtype, arithmetic=options.arithmetic, slow_experts=slow)
    kind = kv_kind(options.kv_dtype, dtype)
    check_attention(config, options.page_size, kind.dtype if kind.codes is None else kind.codes.dtype)
    return plan


def check_arithmetic(arithmetic: str | None, formats: Iterable[Format]) -> None:
    """Refuses FP8 where it would change nothing."""
    if arithmetic not in (None, "16-bit") and not any(map(takes_float8, formats)):
        raise InputError(
            f"arithmetic is {arithmetic}, which is for packed weights of at most 4 bits outside of experts, and "
            "the model has none; leave it out"
        )


def check_attention(config: ModelConfig, page_size: int, kept: torch.dtype) -> None:
    """Refuses sizes that kernels of attention do not take, over a cache of this dtype."""
    from quantkit.kernels.attention.cache import CacheLayout
    from quantkit.kernels.attention.latent.limits import check_heads, check_latents

    if config.latent is None:
        CacheLayout(2, config.kv_heads, page_size, config.head_dim, kept)
        return
    check_latents("latent attention", config.latent.rank, config.latent.rope, page_size)
    check_heads("latent attention", config.latent.plain, config.latent.value)
