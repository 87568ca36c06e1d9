"""A family whose layers differ, described as data: quantize, plan and inspect take it as it is.

Attention has two projections in a row (q_a, norm, q_b). The first layer has a dense MLP; in the others a router sends
every token to two of four experts, and to the last expert of the last layer never. Such a family is no part of
quantkit yet: nothing outside this folder knows its names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

import quantkit
from few_scales import few_scales
from quantkit import arch
from quantkit.arch import Config, Family
from quantkit.calibration import Calibration
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder
from quantkit.stages import Experts, Fold, Part, Stage, dense_stages

FEW = Calibration(samples=6, seq_len=32)

ATTENTION = Part("attention", "self_attn", "input_layernorm")
MLP = Part("mlp", "mlp", "post_attention_layernorm")
TWO_IN_A_ROW = (
    Stage(
        "q_a_kv",
        ("self_attn.q_a_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ATTENTION,
        Fold("norm", "input_layernorm"),
    ),
    Stage("q_b", ("self_attn.q_b_proj",), ATTENTION, Fold("norm", "self_attn.q_a_norm")),
    Stage("output", ("self_attn.o_proj",), ATTENTION, Fold("value", "self_attn.v_proj")),
)


def mixed_layout(layer: int, config: Config) -> tuple[Stage, ...]:
    if layer < config["num_dense_layers"]:
        return TWO_IN_A_ROW + dense_stages()[2:]
    experts = Experts(config["num_experts"], config["num_experts_per_tok"], "mlp.router")
    return (
        *TWO_IN_A_ROW,
        Stage(
            "gate_up",
            ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            MLP,
            Fold("norm", "post_attention_layernorm", ("mlp.router",)),
            experts,
        ),
        Stage("down", ("mlp.experts.{}.down_proj",), MLP, Fold("up", "mlp.experts.{}.up_proj"), experts),
    )


MIXED = Family("mixed_layers", "MixedForCausalLM", layout=mixed_layout)


class MixedConfig(LlamaConfig):
    model_type = "mixed_layers"
    num_dense_layers: int = 1
    num_experts: int = 4
    num_experts_per_tok: int = 2
    q_rank: int = 32


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head, keys = config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_rank, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.q_a_norm = LlamaRMSNorm(config.q_rank)
        self.q_b_proj = nn.Linear(config.q_rank, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        low, k, v = self.q_a_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        q = self.q_b_proj(self.q_a_norm(low))
        q, k, v = (each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class ExpertList(nn.ModuleList):
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, rank = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, tokens, expert(hidden[tokens]) * weights[tokens, rank, None])
        return out


class ExpertMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.per_token = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts)
        self.experts = ExpertList(LlamaMLP(config) for _ in range(config.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(self.per_token)
        return self.experts(flat, chosen, weights).view_as(hidden)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size)
        self.mlp: nn.Module = LlamaMLP(config) if number < config.num_dense_layers else ExpertMLP(config)

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings)[0]
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class MixedModel(PreTrainedModel):
    config_class = MixedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> Tensor:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions)
        result: Tensor = self.norm(hidden)
        return result


class MixedForCausalLM(PreTrainedModel):
    config_class = MixedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MixedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))


AutoConfig.register(MixedConfig.model_type, MixedConfig)
AutoModelForCausalLM.register(MixedConfig, MixedForCausalLM)


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family, known to quantkit for one test."""
    monkeypatch.setitem(arch.FAMILIES, MIXED.model_type, MIXED)
    return MIXED


@pytest.fixture
def model() -> Any:
    """As it was saved in `source`, to be changed at will."""
    return build_model()


def build_model() -> Any:
    config = MixedConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,  # enough that logits depend on every layer
    )
    torch.manual_seed(0)
    model = MixedForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # fresh norms are all alike
            nn.init.uniform_(parameter, 0.3, 1.7)
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.router.bias")[3] = -1e4
    return model


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, with the tokenizer of the bundled model."""
    folder = tmp_path_factory.mktemp("mixed") / "model"
    build_model().save_pretrained(folder)
    load_tokenizer(model_folder("demo-draft")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """`quantized(recipe)`: the checkpoint and its report, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(recipe: str) -> tuple[Path, Any]:
        if recipe not in made:
            folder = tmp_path_factory.mktemp("out") / recipe
            with few_scales():
                made[recipe] = folder, quantkit.quantize(source, recipe, folder, calibration=FEW, quality_windows=1)
        return made[recipe]

    return make


@pytest.fixture
def tokens(source: Path) -> Tensor:
    """That `quantized` was calibrated on."""
    return FEW.tokens(load_tokenizer(source), 64)
