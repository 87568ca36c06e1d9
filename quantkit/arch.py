"""Model families as data: what the quantizer and the runtime must know about a model beyond its config.json.

All supported families are the same decoder with different settings, so a family is a value, not a class of its own.
To add one: read its modelling code in transformers, write its `Family` below, add it to `FAMILIES`; the tests compare
every field with a small model built by transformers.

A field that mirrors a key of config.json holds what transformers takes where the file is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import InputError, did_you_mean

Config = Mapping[str, Any]  # the contents of config.json
Group = tuple[str, ...]  # linear layers that read the same input


@dataclass(frozen=True)
class Fold:
    """Where the input scales of a group may go: the module before it, whose output feeds nothing but this group.

    Only the last outputs of the producer matter (`Family.folded_outputs` says how many), which covers separate and
    fused layers alike. Dividing them by s and multiplying the consumers' input columns by s changes nothing.

        norm    an RMS norm; its effective weight, `weight + norm_offset`, is divided
        value   the value rows; under grouped-query attention one KV head feeds several heads, which then share a scale
        up      the up rows, which meet the activated gate in a plain product
    """

    kind: Literal["norm", "value", "up"]
    producer: str
    consumers: Group


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_O = ("self_attn.o_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)
_AFTER_LINEARS = (Fold("value", "self_attn.v_proj", _O), Fold("up", "mlp.up_proj", _DOWN))


@dataclass(frozen=True)
class Family:
    """One model family. The defaults are Llama's; module names are relative to one block unless said otherwise."""

    model_type: str  # in config.json
    architecture: str  # class name in transformers
    blocks: str = "model.layers"
    # Linears of a block in forward order: queries, keys and values; attention output; gate and up; down. Those in one
    # group share their input and must share one scheme.
    groups: tuple[Group, ...] = (_QKV, _O, _GATE_UP, _DOWN)
    folds: tuple[Fold, ...] = (
        Fold("norm", "input_layernorm", _QKV),
        Fold("norm", "post_attention_layernorm", _GATE_UP),
        *_AFTER_LINEARS,
    )
    # pre: a norm before attention and one before the MLP. sandwich: also one after each, before the residual sum.
    norm: Literal["pre", "sandwich"] = "pre"
    norm_offset: float = 0.0  # added to the stored norm weight; where it is 1, the norm multiplies in float32
    qk_norm: bool = False  # RMS norms `self_attn.q_norm` and `k_norm` over each head, before rope
    qkv_bias: Literal["never", "always", "config"] = "never"  # config: `attention_bias`, which covers o_proj as well
    mlp_bias: Literal["never", "config"] = "never"  # config: `mlp_bias`
    activation: str = "silu"
    activation_key: str = "hidden_act"
    # one: all layers alike. partial: only the first `partial_rotary_factor` of each head is rotated. per-layer-type:
    # sliding layers have a base of their own (`rope_local_base_freq`, or `rope_parameters` by layer type).
    rope: Literal["one", "partial", "per-layer-type"] = "one"
    # upper: layers from `max_window_layers` on, only under `use_sliding_window`. alternating: all layers but every
    # `full_every`-th. In both, `layer_types` in config.json wins.
    sliding: Literal["none", "all", "upper", "alternating"] = "none"
    full_every: int = 0
    sliding_window: int | None = None
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    query_pre_attn_scalar: int | None = None  # attention scores are scaled by its -0.5th power; None: by head_dim's
    attn_logit_softcapping: float | None = None  # None: never applied, whatever config.json says
    final_logit_softcapping: float | None = None
    scaled_embedding: bool = False  # embeddings times sqrt(hidden_size), the factor rounded to the weights' dtype
    tie_word_embeddings: bool = False

    def groups_of(self, layer: int) -> list[Group]:
        """The groups of one block, by full module names."""
        return [tuple(f"{self.blocks}.{layer}.{name}" for name in group) for group in self.groups]

    def linear_groups(self, config: Config) -> list[Group]:
        """The groups of all blocks in forward order."""
        return [group for layer in range(_size(config, "num_hidden_layers")) for group in self.groups_of(layer)]

    def linears(self, config: Config) -> list[str]:
        """Every linear layer inside the blocks, in forward order. `lm_head` is not among them."""
        return [name for group in self.linear_groups(config) for name in group]

    def biased(self, config: Config) -> Group:
        """The linears of a block that have a bias."""
        attention: tuple[Group, ...] = ()
        if self.qkv_bias == "always":
            attention = self.groups[:1]
        elif self.qkv_bias == "config" and config.get("attention_bias"):
            attention = self.groups[:2]
        mlp = self.groups[2:] if self.mlp_bias == "config" and config.get("mlp_bias") else ()
        return tuple(name for group in attention + mlp for name in group)

    def tied(self, config: Config) -> bool:
        """Whether lm_head is the embedding matrix. Gemma's config.json is silent and means yes."""
        return bool(config.get("tie_word_embeddings", self.tie_word_embeddings))

    def size_of_head(self, config: Config) -> int:
        size: int | None = config.get("head_dim") or self.head_dim
        return size or _size(config, "hidden_size") // _heads(config)

    def window(self, config: Config, layer: int) -> int | None:
        """How many tokens a layer sees, the current one included; None: all of them."""
        width: int | None = config.get("sliding_window", self.sliding_window)
        if self.sliding == "none" or (self.sliding == "upper" and not config.get("use_sliding_window")):
            return None
        if self.sliding == "all":
            return width
        if config.get("layer_types"):
            slides = config["layer_types"][layer] == "sliding_attention"
        elif self.sliding == "upper":
            slides = layer >= config.get("max_window_layers", 28)
        else:
            slides = (layer + 1) % config.get("sliding_window_pattern", self.full_every) != 0
        return width if slides else None

    def folded_outputs(self, fold: Fold, config: Config) -> int:
        """How many of the producer's last outputs feed the consumers of a fold."""
        if fold.kind == "value":
            return (config.get("num_key_value_heads") or _heads(config)) * self.size_of_head(config)
        return _size(config, "hidden_size" if fold.kind == "norm" else "intermediate_size")


_GEMMA_FOLDS = (
    Fold("norm", "input_layernorm", _QKV),
    Fold("norm", "pre_feedforward_layernorm", _GATE_UP),
    *_AFTER_LINEARS,
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
    folds=_GEMMA_FOLDS,
    norm="sandwich",
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
    folds=_GEMMA_FOLDS,
    norm="sandwich",
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
    groups=(("self_attn.qkv_proj",), _O, ("mlp.gate_up_proj",), _DOWN),
    folds=(
        Fold("norm", "input_layernorm", ("self_attn.qkv_proj",)),
        Fold("norm", "post_attention_layernorm", ("mlp.gate_up_proj",)),
        Fold("value", "self_attn.qkv_proj", _O),  # rows in the order q, k, v
        Fold("up", "mlp.gate_up_proj", _DOWN),  # rows in the order gate, up
    ),
    rope="partial",
    sliding="all",
)

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3_TEXT, PHI3)}


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


def _size(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    return value
