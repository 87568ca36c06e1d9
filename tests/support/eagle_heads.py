"""Random EAGLE heads in every published layout, and what they compute, in plain torch without a cache.

`save_head(folder, kind, model)` writes a head for a transformers model and returns its reference: `guesses(tokens, k)`
are the head's greedy guesses behind known tokens, from the model's own hidden states. Weights depend on nothing but the
arguments. A head computes everything anew for every guess, over all tokens; what its model makes of the same known
tokens is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from quantkit.runtime.core.step_result import Launched, Outcome

if TYPE_CHECKING:
    from quantkit.runtime.llm import LLM

from tiny_models import build_model

KINDS = ("eagle", "eagle-speculators", "eagle3", "eagle3-speculators", "eagle3.1")
DRAFT_VOCAB = 40
OFTEN = (10, 80)  # of these, model and heads nearly always like one or the other: half of the guesses are right
HEADS, KV_HEADS, HEAD_DIM, THETA, EPS = 4, 2, 64, 500.0, 1e-5  # a size of heads that GPUs run, too


@dataclass
class Reference:
    """`states(tokens)`: what the head reads of every token, by the model."""

    tensors: dict[str, Tensor]
    kind: str
    embedding: Tensor
    head: Tensor
    states: Callable[[list[int]], Tensor]

    @property
    def third(self) -> bool:
        return self.kind.startswith("eagle3")

    @torch.inference_mode()
    def guesses(self, tokens: list[int], count: int) -> list[int]:
        return [int(row.argmax()) for row in self.logits(tokens, count)]

    @torch.inference_mode()
    def logits(self, tokens: list[int], count: int, given: list[int] | None = None) -> list[Tensor]:
        """Behind each of them, over the model's vocabulary; `given` are guesses that were made instead of the best."""
        features, found = self._fused(self.states(tokens)[: len(tokens) - 1]), []
        followers = tokens[1:]
        for number in range(count):
            newest = self._layer(torch.tensor(followers), features)[-1:]
            found.append(self._logits(newest)[0])
            followers = [*followers, int(found[-1].argmax()) if given is None else given[number]]
            features = torch.cat([features, newest])
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _fused(self, states: Tensor) -> Tensor:
        if not self.third:
            return states
        if self.kind == "eagle3.1":
            parts = states.chunk(3, -1)
            states = torch.cat([self._norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)], -1)
        if self.kind == "eagle3-speculators":
            states = self._norm(states, "input_norm")
        return self._linear(states, "fc")

    def _layer(self, ids: Tensor, features: Tensor) -> Tensor:
        tokens = F.embedding(ids, self.embedding)
        if self.third:
            normed = self._norm(features, "layers.0.hidden_norm")
            x = torch.cat([self._norm(tokens, "layers.0.input_layernorm"), normed], -1)
            residual = normed if self.kind == "eagle3-speculators" else features
        else:
            x = residual = self._linear(torch.cat([tokens, features], -1), "fc")
        residual = residual + self._attention(x)
        x = self._norm(residual, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(x, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        residual = residual + self._linear(F.silu(gate) * up, "layers.0.mlp.down_proj")
        return self._norm(residual, "norm") if self.kind == "eagle3.1" else residual

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (self._linear(x, f"layers.0.self_attn.{name}_proj") for name in "qkv")
        q, k, v = (part.view(len(x), -1, HEAD_DIM).transpose(0, 1) for part in (q, k, v))
        q, k = self._turned(q), self._turned(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._linear(attended.transpose(0, 1).flatten(1), "layers.0.self_attn.o_proj")

    def _turned(self, x: Tensor) -> Tensor:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        left, right = x.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def _logits(self, features: Tensor) -> Tensor:
        if not self.third:
            return F.linear(features, self.head)
        if self.kind != "eagle3.1":
            features = self._norm(features, "norm")
        if "d2t" not in self.tensors:
            return F.linear(features, self.head)
        own = F.linear(features, self.tensors["lm_head.weight"])
        whole = own.new_full((len(own), len(self.head)), float("-inf"))
        for number, offset in enumerate(self.tensors["d2t"].tolist()):
            whole[:, number + offset] = own[:, number]
        return whole


def build_target() -> Any:
    """A Llama of seven blocks, whose answers are mostly of two tokens."""
    model = build_model("llama", num_hidden_layers=7, initializer_range=0.1)
    model.lm_head.weight = torch.nn.Parameter(_partial(model.lm_head.weight.detach(), list(OFTEN)))
    return model


def _partial(head: Tensor, rows: list[int]) -> Tensor:
    """Large logits for one of two tokens, whatever the hidden state is."""
    head[rows] = 30 * torch.stack([head[rows[0]], -head[rows[0]]])
    return head


def save_head(folder: Path, kind: str, model: Any, taps: tuple[int, ...] = (), **changes: Any) -> Reference:
    """For a transformers model. `changes` are those of config.json, `taps` what it says of hidden states then."""
    config, random = model.config, torch.Generator().manual_seed(1)
    hidden, vocab, inner = config.hidden_size, config.vocab_size, 96
    third = kind.startswith("eagle3")

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * shape[-1] ** -0.5

    def norm(size: int = hidden) -> Tensor:
        return 0.5 + torch.rand(size, generator=random)

    inputs = 2 * hidden if third else hidden
    tensors = {
        "fc.weight": matrix(hidden, (3 if third else 2) * hidden),
        "layers.0.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, inputs),
        "layers.0.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, inputs),
        "layers.0.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, inputs),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        "layers.0.post_attention_layernorm.weight": norm(),
    }
    if third:
        for name in ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm"):
            tensors[f"{name}.weight"] = norm()
    else:
        tensors["fc.bias"] = matrix(hidden)
    if kind in ("eagle", "eagle3"):
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    if kind in ("eagle3", "eagle3-speculators"):
        others = [token for token in torch.randperm(vocab, generator=random).tolist() if token not in OFTEN]
        chosen = torch.tensor(sorted([*OFTEN, *others[: DRAFT_VOCAB - len(OFTEN)]]))
        tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
        tensors["lm_head.weight"] = _partial(matrix(DRAFT_VOCAB, hidden), [chosen.tolist().index(one) for one in OFTEN])
    if kind == "eagle3-speculators":
        tensors["input_norm.weight"] = norm(3 * hidden)
    if kind == "eagle3.1":
        tensors |= {f"fc_norm.{number}.weight": norm() for number in range(3)}
    folder.mkdir(parents=True, exist_ok=True)
    stored = {_stored(name, kind): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "max_position_embeddings": 64,  # heads are trained on short texts
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
    }
    (folder / "config.json").write_text(json.dumps(_config(kind, sizes) | changes))
    outer = model.get_input_embeddings().weight.detach()
    tapped = taps or {"eagle3-speculators": (1, 3, 5), "eagle3.1": (2, 4, 7)}.get(kind, (2, 3, 4))

    @torch.inference_mode()
    def states(tokens: list[int]) -> Tensor:
        found = _states(model, tuple(tokens))
        return torch.cat([found[block] for block in tapped], -1) if third else found[-1]

    return Reference(tensors, kind, tensors.get("embed_tokens.weight", outer), model.lm_head.weight.detach(), states)


@lru_cache(maxsize=1024)  # the same answers are met with every head
def _states(model: Any, tokens: tuple[int, ...]) -> list[Tensor]:
    """What goes into every block, what comes out of the last one, and what the head reads."""
    inner, found = model.model, []
    hooks = [block.register_forward_pre_hook(lambda _, given: found.append(given[0][0])) for block in inner.layers]
    hooks.append(inner.norm.register_forward_pre_hook(lambda _, given: found.append(given[0][0])))
    last = inner(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return [*found, last]


def _stored(name: str, kind: str) -> str:
    """As those who publish such heads name it."""
    if kind == "eagle3":
        return name.replace("layers.0.", "midlayer.")
    if kind == "eagle-speculators":
        return name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.")
    return f"model.{name}" if kind == "eagle3.1" else name


def _config(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    if kind == "eagle":
        return {"architectures": ["LlamaForCausalLM"]} | sizes
    if kind == "eagle-speculators":
        return {"speculators_model_type": "eagle", "fusion_bias": True, "transformer_layer_config": sizes}
    if kind == "eagle3":
        return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB} | sizes
    if kind == "eagle3.1":
        inner = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}
        return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": inner, "norm_output": True} | sizes
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "transformer_layer_config": sizes,
    }


def watch_guesses(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], torch.Tensor | None]]:
    """Known tokens, the guesses behind them, and the logits that they were drawn from, of every step that is seen."""
    runner, seen = llm.engine.runner, []
    collect = runner.collect

    def watched(launched: Launched) -> list[Outcome]:
        found, row = collect(launched), 0
        for work in launched.sampling:
            if work.draft and launched.verified is not None:
                guesses = launched.verified[row + 1 : row + 1 + len(work.draft)].tolist()
                seen.append((list(work.sequence.tokens), guesses, launched.plan.proposals.get(work.sequence.id)))
            row += 1 + len(work.draft)
        return found

    monkeypatch.setattr(runner, "collect", watched)
    return seen
