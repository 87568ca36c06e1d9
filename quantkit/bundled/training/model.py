"""The network in plain PyTorch, with the parameter names of transformers: a Llama, or a Qwen3 with experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from .experts import Experts, Routing

SIZES: dict[str, dict[str, int]] = {
    "demo": {
        "hidden_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1280,
    },
    "draft": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
    },
    "experts": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,  # what a token passes through
        "moe_intermediate_size": 128,
        "num_experts": 12,
        "num_experts_per_tok": 2,
    },
}
ROPE_THETA = 10000.0
MAX_POSITIONS = 2048


def make_config(size: str, vocab_size: int, eos: int) -> PreTrainedConfig:
    """The configuration of one of the bundled sizes."""
    kind, architecture, own = LlamaConfig, "LlamaForCausalLM", {"mlp_bias": False}
    if "num_experts" in SIZES[size]:
        kind, architecture, own = Qwen3MoeConfig, "Qwen3MoeForCausalLM", {"norm_topk_prob": True}
    config = kind(
        **SIZES[size],
        **own,
        vocab_size=vocab_size,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        attention_bias=False,
        hidden_act="silu",
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    config.architectures = [architecture]
    config.dtype = torch.bfloat16
    return config


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, the two halves of a head paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads; beside experts, queries and keys are normalised."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        normed = isinstance(config, Qwen3MoeConfig)
        self.q_norm = Norm(self.dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = Norm(self.dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.dim))
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.dim))
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp: Mlp | Experts
        if isinstance(config, Qwen3MoeConfig):
            sizes = config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
            self.mlp = Experts(*sizes)
        else:
            self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, routings: list[Routing]) -> Tensor:
        """Adds to `routings` where the layer has experts."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        inner = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Mlp):
            out: Tensor = self.mlp(inner)
        else:
            routings.append(self.mlp.route(inner))
            out = self.mlp(inner, routings[-1].weights)
        return x + out


class Body(nn.Module):
    """Embedding, layers and last normalisation."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The whole network; the output matrix is the embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.model = Body(config)
        angles = torch.outer(
            torch.arange(MAX_POSITIONS).float(),
            ROPE_THETA ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim),
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                last = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
                nn.init.normal_(weight, std=0.02 / ((2 * config.num_hidden_layers) ** 0.5 if last else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.with_routings(ids)[0]

    def with_routings(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """Logits, and what the router of every layer with experts said."""
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        routings: list[Routing] = []
        for layer in self.model.layers:
            x = layer(x, cos, sin, routings)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), routings
