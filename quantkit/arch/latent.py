"""Families with latent attention: keys and values of all heads are made from one short vector of a token."""

from __future__ import annotations

from functools import partial

from quantkit.arch.family import Family
from quantkit.arch.routed import SharedAndRouted
from quantkit.arch.routing import CorrectedRouting, GreedyRouting
from quantkit.arch.sizes import Config, latent_sizes
from quantkit.stages import Stage, latent_stages


def _layout(layer: int, config: Config, *, mlps: SharedAndRouted) -> tuple[Stage, ...]:
    attention = latent_stages(from_hidden=latent_sizes(config).query_rank is None)
    return attention + mlps.stages(layer, config)


_V2 = SharedAndRouted(GreedyRouting(), dense=0, count=64, per_token=None, shared=2, width=1407)
_V3 = SharedAndRouted(
    CorrectedRouting(groups=8, groups_chosen=4, scale=2.5), dense=3, count=256, per_token=8, shared=1, width=2048
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    layout=partial(_layout, mlps=_V2),
    latent=True,
    qkv_bias="config",
    mlp_bias="config",
)

DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", layout=partial(_layout, mlps=_V3), latent=True, qkv_bias="config"
)
