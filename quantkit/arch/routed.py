"""Families whose MLPs are experts, of which a router chooses some for every token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from quantkit.arch.family import DENSE, Family
from quantkit.arch.fused import Fused
from quantkit.arch.routing import CorrectedRouting
from quantkit.arch.sizes import Config, size
from quantkit.errors import InputError
from quantkit.stages import Experts, Part, Routing, Stage, mlp_stages

MOST_EXPERTS = 10_000
_EXPERT_KEYS = ("num_experts", "num_local_experts")


def _mixtral(_: int, config: Config) -> tuple[Stage, ...]:
    count = _experts(config, default=8)
    experts = Experts(count, _chosen(config, count, default=2), "block_sparse_moe.gate")
    part = Part("mlp", "block_sparse_moe", "post_attention_layernorm")
    return DENSE[:2] + mlp_stages("block_sparse_moe.experts.{}", "", part, ("w1", "w3", "w2"), experts)


def _qwen_moe(layer: int, config: Config, *, count: int, chosen: int, width: int) -> tuple[Stage, ...]:
    """Experts in every layer but those that `mlp_only_layers` and `decoder_sparse_step` leave out."""
    step = config.get("decoder_sparse_step", 1)
    if (
        0 in (config.get(key) for key in _EXPERT_KEYS)
        or layer in (config.get("mlp_only_layers") or ())
        or (layer + 1) % step
    ):
        return DENSE
    count = _experts(config, default=count)
    routing = Routing(normalized=bool(config.get("norm_topk_prob", False)))
    experts = Experts(count, _chosen(config, count, default=chosen), "mlp.gate", routing)
    width = size(config, "moe_intermediate_size", default=width)
    return DENSE[:2] + mlp_stages("mlp.experts.{}", experts=experts, width=width)


def _qwen2_moe(layer: int, config: Config) -> tuple[Stage, ...]:
    stages = _qwen_moe(layer, config, count=60, chosen=4, width=1408)
    if stages is DENSE:
        return stages
    width = size(config, "shared_expert_intermediate_size", default=5632)
    return stages + mlp_stages("mlp.shared_expert", "shared_", width=width, gate="mlp.shared_expert_gate")


def _gpt_oss(_: int, config: Config) -> tuple[Stage, ...]:
    """A softmax over the chosen logits is one over all of them, divided by the sum of the chosen. Between gate_up and
    down stands `up + 1`, clipped, so that no scales go into up."""
    count = _experts(config, default=128)
    experts = Experts(count, _chosen(config, count, default=4), "mlp.router", router_biased=True)
    gate_up, down = mlp_stages("mlp.experts.{}", experts=experts)
    return (*DENSE[:2], gate_up, replace(down, fold=None))


class ReadRouting(Protocol):
    def read(self, config: Config, experts: int, per_token: int) -> Routing: ...


@dataclass(frozen=True)
class SharedAndRouted:
    """The MLPs of DeepSeek's layers: dense in the first, then experts beside one MLP of all shared experts.

    The numbers are what a silent config.json means.
    """

    routing: ReadRouting
    dense: int  # layers
    count: int
    per_token: int | None
    shared: int
    width: int

    def stages(self, layer: int, config: Config) -> tuple[Stage, ...]:
        if config.get("moe_layer_freq", 1) != 1:
            raise InputError(
                f"config.json: 'moe_layer_freq' is {config['moe_layer_freq']!r}, but transformers puts experts into "
                "every layer after the first dense ones, and so must the model; use another engine"
            )
        if layer < self._dense_layers(config):
            return DENSE[2:]
        count = size(config, "n_routed_experts", MOST_EXPERTS, self.count)
        per_token = _chosen(config, count, self.per_token)
        experts = Experts(count, per_token, "mlp.gate", self.routing.read(config, count, per_token))
        width = size(config, "moe_intermediate_size", default=self.width)
        shared = width * size(config, "n_shared_experts", default=self.shared)
        routed = mlp_stages("mlp.experts.{}", experts=experts, width=width)
        return routed + mlp_stages("mlp.shared_experts", "shared_", width=shared)

    def _dense_layers(self, config: Config) -> int:
        value = config.get("first_k_dense_replace", self.dense)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"config.json: 'first_k_dense_replace' is {value!r}, but must be a whole number from 0 on")
        return value


_GLM4 = SharedAndRouted(CorrectedRouting(), dense=1, count=128, per_token=8, shared=1, width=1408)


def _glm4_moe(layer: int, config: Config) -> tuple[Stage, ...]:
    return DENSE[:2] + _GLM4.stages(layer, config)


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    layout=_mixtral,
    rope_theta=1_000_000.0,
    norm_eps=1e-5,
    sliding="all",
    renamed=(("block_sparse_moe", "mlp"),),
)

QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", layout=_qwen2_moe, qkv_bias="unless", sliding="lower", sliding_window=4096
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    layout=partial(_qwen_moe, count=128, chosen=8, width=768),
    qk_norm=True,
    qkv_bias="config",
    sliding="switched",
    sliding_window=4096,
)

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    layout=_glm4_moe,
    qk_norm_key="use_qk_norm",
    qkv_bias="inputs",
    norm_eps=1e-5,
    rope="partial",
    partial_rotary_factor=0.5,
)

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    layout=_gpt_oss,
    qkv_bias="assumed",
    mlp_bias="always",
    norm_eps=1e-5,
    sinks=True,
    clipped=(7.0, 1.702),
    rope_theta=150_000.0,
    rope_defaults=(
        ("rope_type", "yarn"),
        ("factor", 32.0),
        ("beta_fast", 32.0),
        ("beta_slow", 1.0),
        ("truncate", False),
        ("original_max_position_embeddings", 4096),
    ),
    sliding="alternating",
    full_every=2,
    sliding_window=128,
    head_dim=64,
    fused=(
        Fused("mlp.experts.gate_up_proj", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")),
        Fused("mlp.experts.down_proj", ("mlp.experts.{}.down_proj",)),
    ),
)


def _experts(config: Config, default: int) -> int:
    """Of a layer; versions of transformers differ in how they call it."""
    key = next((key for key in _EXPERT_KEYS if key in config), _EXPERT_KEYS[0])
    return size(config, key, MOST_EXPERTS, default)


def _chosen(config: Config, count: int, default: int | None) -> int:
    """Experts of a token."""
    chosen = size(config, "num_experts_per_tok", default=default)
    if chosen > count:
        raise InputError(f"config.json: 'num_experts_per_tok' is {chosen}, but there are {count} experts")
    return chosen
