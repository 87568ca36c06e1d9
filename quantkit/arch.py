"""Model families as data: what the quantizer and the runtime must know about a model beyond its config.json.

All supported families are the same decoder with different settings, so a family is a value, not a class of its own.
To add one: read its modelling code in transformers, write its `Family` below, add it to `FAMILIES`; the tests compare
every field with a small model built by transformers.

A field that mirrors a key of config.json holds what transformers takes where the file is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from quantkit.errors import InputError, did_you_mean
from quantkit.stages import Experts, Fold, Group, Part, Routing, Stage, dense_stages, mlp_stages

Config = Mapping[str, Any]  # the contents of config.json
MOST_LAYERS = 10_000  # a file that says more would make lists that no memory holds
MOST_EXPERTS = 10_000
_EXPERT_KEYS = ("num_experts", "num_local_experts")
_LLAMA = dense_stages()


@dataclass(frozen=True)
class Family:
    """One model family. The defaults are Llama's; module names are relative to one block unless said otherwise."""

    model_type: str  # in config.json
    architecture: str  # class name in transformers
    blocks: str = "model.layers"
    # The stages of a layer in forward order, or a function of layer number and config.json where layers differ. Every
    # linear and every residual part must be there.
    layout: tuple[Stage, ...] | Callable[[int, Config], tuple[Stage, ...]] = _LLAMA
    norm_offset: float = 0.0  # added to the stored norm weight; where it is 1, the norm multiplies in float32
    qk_norm: bool = False  # RMS norms `self_attn.q_norm` and `k_norm` over each head, before rope
    # config: `attention_bias`, which covers o_proj as well. unless: `qkv_bias`, true where config.json is silent.
    qkv_bias: Literal["never", "always", "config", "unless"] = "never"
    mlp_bias: Literal["never", "config"] = "never"  # config: `mlp_bias`
    activation: str = "silu"
    activation_key: str = "hidden_act"
    # one: all layers alike. partial: only the first `partial_rotary_factor` of each head is rotated. per-layer-type:
    # sliding layers have a base of their own (`rope_local_base_freq`, or `rope_parameters` by layer type).
    rope: Literal["one", "partial", "per-layer-type"] = "one"
    rope_theta: float = 10_000.0
    longrope_aliases: tuple[str, ...] = ()  # rope types that mean `longrope` in older files of this family
    # switched: all layers, only under `use_sliding_window`. upper: the same from layer `max_window_layers` on. lower:
    # the same for every second layer below. alternating: all layers but every `full_every`-th. In the last three,
    # `layer_types` in config.json wins.
    sliding: Literal["none", "all", "switched", "upper", "lower", "alternating"] = "none"
    full_every: int = 0
    sliding_window: int | None = None
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    query_pre_attn_scalar: int | None = None  # attention scores are scaled by its -0.5th power; None: by head_dim's
    attn_logit_softcapping: float | None = None  # None: never applied, whatever config.json says
    final_logit_softcapping: float | None = None
    # Parts of a layer that files call otherwise than transformers: name in the files -> name of the module.
    renamed: tuple[tuple[str, str], ...] = ()
    scaled_embedding: bool = False  # embeddings times sqrt(hidden_size), the factor rounded to the weights' dtype
    tie_word_embeddings: bool = False

    def stages(self, layer: int, config: Config) -> tuple[Stage, ...]:
        """What one layer consists of, in forward order; names are those inside the layer."""
        return self.layout(layer, config) if callable(self.layout) else self.layout

    def modules(self, layer: int, stage: Stage) -> Group:
        """The linears of a stage by full module names."""
        return tuple(f"{self.blocks}.{layer}.{name}" for name in stage.linears)

    def linears_by_stage(self, config: Config) -> list[list[Group]]:
        """The linears of every stage of every layer by full module names, in forward order."""
        layers = range(_size(config, "num_hidden_layers", MOST_LAYERS))
        return [[self.modules(layer, stage) for stage in self.stages(layer, config)] for layer in layers]

    def linear_groups(self, config: Config) -> list[Group]:
        """The same without the division into layers."""
        return [linears for stages in self.linears_by_stage(config) for linears in stages]

    def linears(self, config: Config) -> list[str]:
        """Every linear layer inside the blocks, in forward order. `lm_head` is not among them."""
        return [name for linears in self.linear_groups(config) for name in linears]

    def biased(self, layer: int, config: Config) -> Group:
        """The linears of a layer that have a bias."""
        roles: tuple[str, ...] = ()
        if self.qkv_bias == "always" or (self.qkv_bias == "unless" and config.get("qkv_bias", True)):
            roles = ("qkv",)
        elif self.qkv_bias == "config" and config.get("attention_bias"):
            roles = ("qkv", "output")
        if self.mlp_bias == "config" and config.get("mlp_bias"):
            roles += ("gate_up", "down")
        return tuple(name for stage in self.stages(layer, config) if stage.role in roles for name in stage.linears)

    def tied(self, config: Config) -> bool:
        """Whether lm_head is the embedding matrix. Gemma's config.json is silent and means yes."""
        return bool(config.get("tie_word_embeddings", self.tie_word_embeddings))

    def size_of_head(self, config: Config) -> int:
        size: int | None = config.get("head_dim") or self.head_dim
        return size or _size(config, "hidden_size") // _heads(config)

    def window(self, config: Config, layer: int) -> int | None:
        """How many tokens a layer sees, the current one included; None: all of them."""
        width: int | None = config.get("sliding_window", self.sliding_window)
        switched = self.sliding in ("switched", "upper", "lower")
        if self.sliding == "none" or (switched and not config.get("use_sliding_window")):
            return None
        if self.sliding in ("all", "switched"):
            return width
        if config.get("layer_types"):
            slides = config["layer_types"][layer] == "sliding_attention"
        elif self.sliding == "upper":
            slides = layer >= config.get("max_window_layers", 28)
        elif self.sliding == "lower":
            slides = layer < config.get("max_window_layers", 28) and layer % 2 == 0
        else:
            slides = (layer + 1) % config.get("sliding_window_pattern", self.full_every) != 0
        return width if slides else None

    def folded_outputs(self, fold: Fold, columns: int, config: Config) -> int:
        """How many of the producer's last outputs feed a stage that reads this many columns."""
        if fold.kind == "value":
            return (config.get("num_key_value_heads") or _heads(config)) * self.size_of_head(config)
        return columns


_GEMMA = dense_stages(
    Part("attention", "self_attn", "input_layernorm", "post_attention_layernorm"),
    Part("mlp", "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

LLAMA = Family("llama", "LlamaForCausalLM", qkv_bias="config", mlp_bias="config")

MISTRAL = Family("mistral", "MistralForCausalLM", sliding="all", sliding_window=4096)

QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qkv_bias="always", sliding="upper", sliding_window=4096)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    qk_norm=True,
    qkv_bias="config",
    head_dim=128,
    sliding="upper",
    sliding_window=4096,
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    layout=_GEMMA,
    norm_offset=1.0,
    qkv_bias="config",
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    sliding="alternating",
    full_every=2,
    sliding_window=4096,
    head_dim=256,
    query_pre_attn_scalar=256,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    scaled_embedding=True,
    tie_word_embeddings=True,
)

GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    layout=_GEMMA,
    norm_offset=1.0,
    qk_norm=True,
    qkv_bias="config",
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    rope="per-layer-type",
    sliding="alternating",
    full_every=6,
    sliding_window=4096,
    head_dim=256,
    query_pre_attn_scalar=256,
    scaled_embedding=True,
    tie_word_embeddings=True,
)

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    layout=dense_stages(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    rope="partial",
    longrope_aliases=("su", "yarn"),
    sliding="all",
)


def _mixtral(_: int, config: Config) -> tuple[Stage, ...]:
    count = _experts(config, default=8)
    experts = Experts(count, _chosen(config, count, default=2), "block_sparse_moe.gate")
    part = Part("mlp", "block_sparse_moe", "post_attention_layernorm")
    return _LLAMA[:2] + mlp_stages("block_sparse_moe.experts.{}", "", part, ("w1", "w3", "w2"), experts)


def _qwen_moe(layer: int, config: Config, *, count: int, chosen: int, width: int) -> tuple[Stage, ...]:
    """Experts in every layer but those that `mlp_only_layers` and `decoder_sparse_step` leave out."""
    step = config.get("decoder_sparse_step", 1)
    if (
        0 in (config.get(key) for key in _EXPERT_KEYS)
        or layer in (config.get("mlp_only_layers") or ())
        or (layer + 1) % step
    ):
        return _LLAMA
    count = _experts(config, default=count)
    routing = Routing(normalized=bool(config.get("norm_topk_prob", False)))
    experts = Experts(count, _chosen(config, count, default=chosen), "mlp.gate", routing)
    width = _size(config, "moe_intermediate_size", default=width)
    return _LLAMA[:2] + mlp_stages("mlp.experts.{}", experts=experts, width=width)


def _qwen2_moe(layer: int, config: Config) -> tuple[Stage, ...]:
    stages = _qwen_moe(layer, config, count=60, chosen=4, width=1408)
    if stages is _LLAMA:
        return stages
    width = _size(config, "shared_expert_intermediate_size", default=5632)
    return stages + mlp_stages("mlp.shared_expert", "shared_", width=width, gate="mlp.shared_expert_gate")


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    layout=_mixtral,
    rope_theta=1_000_000.0,
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

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3_TEXT, PHI3, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
FAMILIES = {family.model_type: family for family in _ALL}


def family_of(config: Config) -> Family:
    """The family of a model, from its config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"config.json has no model_type; known families: {', '.join(sorted(FAMILIES))}")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if "text_config" in config:
        raise InputError(
            f"model_type '{model_type}' takes more than text; only the text families are supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    raise InputError(f"model_type '{model_type}' is not supported; {did_you_mean(model_type, FAMILIES)}")


def _heads(config: Config) -> int:
    return _size(config, "num_attention_heads")


def _experts(config: Config, default: int) -> int:
    """Of a layer; versions of transformers differ in how they call it."""
    key = next((key for key in _EXPERT_KEYS if key in config), _EXPERT_KEYS[0])
    return _size(config, key, MOST_EXPERTS, default)


def _chosen(config: Config, count: int, default: int) -> int:
    """Experts of a token."""
    chosen = _size(config, "num_experts_per_tok", default=default)
    if chosen > count:
        raise InputError(f"config.json: 'num_experts_per_tok' is {chosen}, but there are {count} experts")
    return chosen


def _size(config: Config, key: str, most: int | None = None, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    if most is not None and value > most:
        raise InputError(f"config.json: '{key}' is {value}, but no model has more than {most:,}")
    return value
