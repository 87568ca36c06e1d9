"""What the decoder must know about a model, read once from config.json and the family."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.arch import Config, Family, family_of
from quantkit.errors import InputError
from quantkit.stages import Stage

ROLES = ("qkv", "output", "gate_up", "down")  # of the stages of a layer that the decoder runs
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and settings of one decoder."""

    family: Family
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]  # of every layer: how many tokens it sees; None: all
    stages: tuple[tuple[Stage, ...], ...]  # of every layer, in the order of `ROLES`
    activation: str
    norm_eps: float
    attention_scale: float
    attention_cap: float | None
    logit_cap: float | None
    embedding_scale: float | None
    tied: bool
    eos: tuple[int, ...]  # tokens that end an answer

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def plus_one(self) -> bool:
        """Whether norms multiply by 1 + weight."""
        return self.family.norm_offset == 1.0

    def outputs(self, stage: Stage) -> tuple[int, ...]:
        """Of each linear of a stage; a fused one has those of all."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"qkv": (queries, keys, keys), "gate_up": (self.intermediate, self.intermediate)}
        outputs = sizes.get(stage.role, (self.hidden,))
        return outputs if len(outputs) == len(stage.linears) else (sum(outputs),)

    def inputs(self, stage: Stage) -> int:
        """That the linears of a stage read."""
        return {"output": self.heads * self.head_dim, "down": self.intermediate}.get(stage.role, self.hidden)


def read_model_config(config: Config, generation: Config | None = None) -> ModelConfig:
    """The settings of a model from config.json; `generation` is generation_config.json, whose end tokens win."""
    family = family_of(config)
    heads = _whole(config, "num_attention_heads")
    layers = _whole(config, "num_hidden_layers")
    head_dim = family.size_of_head(config)
    hidden = _whole(config, "hidden_size")
    scalar = config.get("query_pre_attn_scalar", family.query_pre_attn_scalar) or head_dim
    return ModelConfig(
        family=family,
        vocab=_whole(config, "vocab_size"),
        hidden=hidden,
        intermediate=_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=_whole(config, "max_position_embeddings"),
        windows=tuple(family.window(config, layer) for layer in range(layers)),
        stages=tuple(_stages(family, layer, config) for layer in range(layers)),
        activation=_activation(config, family),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        attention_scale=(scalar if family.query_pre_attn_scalar else head_dim) ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping", family.attn_logit_softcapping),
        logit_cap=_cap(config, "final_logit_softcapping", family.final_logit_softcapping),
        embedding_scale=hidden**0.5 if family.scaled_embedding else None,
        tied=family.tied(config),
        eos=_end_tokens(config, generation or {}),
    )


def _stages(family: Family, layer: int, config: Config) -> tuple[Stage, ...]:
    """Refuses a layer that the decoder cannot run."""
    stages = family.stages(layer, config)
    if tuple(stage.role for stage in stages) != ROLES or any(stage.experts for stage in stages):
        found = ", ".join(f"{stage.role} (experts)" if stage.experts else stage.role for stage in stages)
        raise InputError(
            f"model_type '{family.model_type}' cannot be run: layer {layer} consists of {found}, and the runtime runs "
            f"layers of {', '.join(ROLES)} only; use another engine"
        )
    return stages


def _whole(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    return value


def _activation(config: Config, family: Family) -> str:
    named = config.get(family.activation_key) or config.get("hidden_act") or family.activation
    if named not in _ACTIVATIONS:
        raise InputError(f"config.json: activation '{named}' is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def _cap(config: Config, key: str, default: float | None) -> float | None:
    """A soft cap that the family does not know is never applied."""
    if default is None:
        return None
    value = config.get(key, default)
    return None if value is None else float(value)


def _end_tokens(config: Config, generation: Config) -> tuple[int, ...]:
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)
