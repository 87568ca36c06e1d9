"""What a family of models says of itself. A field that mirrors a key of config.json holds what transformers takes where
the file is silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quantkit.arch.fused import Fused, Slice
from quantkit.arch.sizes import MOST_LAYERS, Config, LatentSizes, latent_sizes, size
from quantkit.stages import Fold, Group, Stage, dense_stages

DENSE = dense_stages()
LATENT_EPS = 1e-6  # whatever `rms_norm_eps` says


@dataclass(frozen=True)
class Family:
    """One model family. The defaults are Llama's; module names are relative to one block unless said otherwise."""

    model_type: str  # in config.json
    architecture: str  # class name in transformers
    blocks: str = "model.layers"
    # The stages of a layer in forward order, or a function of layer number and config.json where layers differ. Every
    # linear and every residual part must be there.
    layout: tuple[Stage, ...] | Callable[[int, Config], tuple[Stage, ...]] = DENSE
    norm_offset: float = 0.0  # added to the stored norm weight; where it is 1, the norm multiplies in float32
    latent: bool = False  # attention of `latent_stages`; its own norms have `LATENT_EPS`
    norm_eps: float = 1e-6
    qk_norm: bool = False  # RMS norms `self_attn.q_norm` and `k_norm` over each head, before rope
    qk_norm_key: str | None = None  # of config.json, where that says whether there are some
    # config: `attention_bias`, which covers o_proj as well; assumed: the same, true where config.json is silent.
    # inputs: `attention_bias` without o_proj. unless: `qkv_bias`, true where config.json is silent.
    qkv_bias: Literal["never", "always", "config", "assumed", "inputs", "unless"] = "never"
    # always: experts too. config: `mlp_bias`, of all MLPs but experts.
    mlp_bias: Literal["never", "always", "config"] = "never"
    sinks: bool = False  # `self_attn.sinks`: a score for every head that joins the softmax and has no value
    activation: str = "silu"
    clipped: tuple[float, float] | None = None  # `swiglu_limit` and `swiglu_alpha`, where gate and up are clipped
    activation_key: str = "hidden_act"
    # one: all layers alike. partial: only the first `partial_rotary_factor` of each head is rotated. per-layer-type:
    # sliding layers have a base of their own (`rope_local_base_freq`, or `rope_parameters` by layer type).
    rope: Literal["one", "partial", "per-layer-type"] = "one"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    rope_defaults: tuple[tuple[str, str | float | bool], ...] = ()  # `rope_parameters` of a file without any
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
    fused: tuple[Fused, ...] = ()  # tensors of files that hold all experts of a layer
    scaled_embedding: bool = False  # embeddings times sqrt(hidden_size), the factor rounded to the weights' dtype
    tie_word_embeddings: bool = False

    @property
    def may_have_experts(self) -> bool:
        """Whether it is worth asking layer by layer: a family whose layers are all alike has none."""
        return callable(self.layout)

    def stages(self, layer: int, config: Config) -> tuple[Stage, ...]:
        """What one layer consists of, in forward order; names are those inside the layer."""
        return self.layout(layer, config) if callable(self.layout) else self.layout

    def modules(self, layer: int, stage: Stage) -> Group:
        """The linears of a stage by full module names."""
        return tuple(f"{self.blocks}.{layer}.{name}" for name in stage.linears)

    def linears_by_stage(self, config: Config) -> list[list[Group]]:
        """The linears of every stage of every layer by full module names, in forward order."""
        layers = range(size(config, "num_hidden_layers", MOST_LAYERS))
        return [[self.modules(layer, stage) for stage in self.stages(layer, config)] for layer in layers]

    def fused_linears(self, config: Config) -> list[list[Group]]:
        """The linears of every layer that engines run as one matrix: as above, each expert's by themselves."""
        layers = range(size(config, "num_hidden_layers", MOST_LAYERS))
        return [
            [self.modules(layer, each) for stage in self.stages(layer, config) for each in stage.by_expert]
            for layer in layers
        ]

    def linear_groups(self, config: Config) -> list[Group]:
        """The linears of every stage without the division into layers."""
        return [linears for stages in self.linears_by_stage(config) for linears in stages]

    def linears(self, config: Config) -> list[str]:
        """Every linear layer inside the blocks, in forward order. `lm_head` is not among them."""
        return [name for linears in self.linear_groups(config) for name in linears]

    def biased(self, layer: int, config: Config) -> Group:
        """The linears of a layer that have a bias."""
        roles: tuple[str, ...] = ()
        if self.qkv_bias == "always" or (self.qkv_bias == "unless" and config.get("qkv_bias", True)):
            roles = ("qkv",)
        elif self.qkv_bias in ("config", "inputs", "assumed"):
            roles = ("qkv", "output") if config.get("attention_bias", self.qkv_bias == "assumed") else ()
            roles = roles[:1] if self.qkv_bias == "inputs" else roles
        if self.mlp_bias == "always" or (self.mlp_bias == "config" and config.get("mlp_bias")):
            roles += ("gate_up", "down", "shared_gate_up", "shared_down")
        stages = [stage for stage in self.stages(layer, config) if stage.role in roles]
        never = "self_attn.q_proj" if self.latent else None
        experts = self.mlp_bias == "always"
        return tuple(name for stage in stages if experts or not stage.routed for name in stage.linears if name != never)

    def is_beyond(self, name: str, config: Config) -> bool:
        """Whether a tensor is of a layer after the last one, made to guess tokens: nobody here runs it."""
        layer = name.removeprefix(f"{self.blocks}.").partition(".")[0]
        layers, more = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
        return name.startswith(f"{self.blocks}.") and layer.isdecimal() and layers <= int(layer) < layers + more

    def in_float32(self, config: Config) -> list[str]:
        """Tensors that an engine keeps in float32 whatever the model's dtype: what such routers compute with."""
        found = []
        for layer in range(size(config, "num_hidden_layers", MOST_LAYERS)):
            for experts in {stage.experts for stage in self.stages(layer, config) if stage.experts}:
                names = [f"{experts.router}.weight"] if experts.routing.float32 else []
                names += [experts.correction] if experts.correction else []
                found += [f"{self.blocks}.{layer}.{name}" for name in names]
        return found

    def gates(self, config: Config) -> list[str]:
        """Small linears that are never quantized: routers, and what says how much a shared expert counts."""
        found: dict[str, None] = {}
        for layer in range(size(config, "num_hidden_layers", MOST_LAYERS)):
            for stage in self.stages(layer, config):
                names = (stage.experts and stage.experts.router, stage.gate)
                found |= dict.fromkeys(f"{self.blocks}.{layer}.{name}" for name in names if name)
        return list(found)

    def has_qk_norm(self, config: Config) -> bool:
        return self.qk_norm if self.qk_norm_key is None else bool(config.get(self.qk_norm_key))

    def slices(self, name: str, experts: int) -> dict[str, Slice]:
        """Of a tensor in the files that holds so many experts: what it holds of each; empty for any other tensor."""
        return {part: where for fused in self.fused for part, where in fused.slices(name, experts)}

    def tied(self, config: Config) -> bool:
        """Whether lm_head is the embedding matrix. Gemma's config.json is silent and means yes."""
        return bool(config.get("tie_word_embeddings", self.tie_word_embeddings))

    def latent_sizes(self, config: Config) -> LatentSizes | None:
        return latent_sizes(config) if self.latent else None

    def decoded_at_load(self, config: Config) -> list[str]:
        """Linears that an engine does not run as such: of latent attention, what makes keys and values."""
        layers = range(size(config, "num_hidden_layers", MOST_LAYERS))
        stages = [(layer, stage) for layer in layers for stage in self.stages(layer, config)]
        return [module for layer, stage in stages if stage.role == "kv_b" for module in self.modules(layer, stage)]

    def size_of_head(self, config: Config) -> int:
        """Of latent attention: what turns."""
        if self.latent:
            return latent_sizes(config).rope
        given: int | None = config.get("head_dim") or self.head_dim
        return given or size(config, "hidden_size") // size(config, "num_attention_heads")

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
            return (config.get("num_key_value_heads") or size(config, "num_attention_heads")) * self.size_of_head(
                config
            )
        return columns
