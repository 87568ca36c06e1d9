"""Heads in the layouts of others: the same numbers as their formula, answers of plain decoding, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.drafters.medusa_heads import Target
from quantkit.runtime.drafters.published_heads import PICKLE, PublishedHeads, find_published, load_published
from quantkit.runtime.llm import LLM
from quantkit.sources import model_folder

HIDDEN, VOCAB, HEADS, LAYERS = 16, 40, 3, 2
TARGET = Target("llama", HIDDEN, VOCAB, 2, "0" * 64)


class ResidualLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def reference(hidden: int = HIDDEN, vocab: int = VOCAB, layers: int = LAYERS) -> nn.ModuleList:
    """The heads of the paper, as modules: `I.J.linear` and the output layer behind them."""
    torch.manual_seed(1)
    return nn.ModuleList(
        nn.Sequential(*(ResidualLayer(hidden) for _ in range(layers)), nn.Linear(hidden, vocab, bias=False))
        for _ in range(HEADS)
    )


def as_medusa(heads: nn.ModuleList) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "org/model"}
    return "medusa_lm_head.safetensors", dict(heads.state_dict()), config


def as_medusa_without_outputs(heads: nn.ModuleList) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    name, tensors, config = as_medusa(heads)
    return name, {key: value for key, value in tensors.items() if "linear" in key}, config


def as_vllm(heads: nn.ModuleList) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    tensors = {}
    for name, value in heads.state_dict().items():
        head, layer, *rest = name.split(".")
        tensors[f"blocks.{head}.layers.{layer}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"] = (
            value
        )
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": LAYERS, "medusa_fc_bias": True}
    return "model.safetensors", tensors, config


def as_vllm_with_few_tokens(heads: nn.ModuleList) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    name, tensors, config = as_vllm(heads)
    return name, tensors | {"token_map": torch.arange(VOCAB - 1, 4, -1)}, config | {"truncated_vocab_size": VOCAB - 5}


def as_vllm_with_one_output(heads: nn.ModuleList) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    name, tensors, config = as_vllm(heads)
    kept = {key: value for key, value in tensors.items() if key not in ("lm_heads.1.weight", "lm_heads.2.weight")}
    return name, {f"medusa_heads.{key}": value for key, value in kept.items()}, config | {"original_lm_head": True}


Layout = Callable[[nn.ModuleList], tuple[str, dict[str, Tensor], dict[str, Any]]]


def saved(folder: Path, layout: Layout, heads: nn.ModuleList) -> Path:
    name, tensors, config = layout(heads)
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(folder: Path, target: Target) -> PublishedHeads:
    file = find_published(folder)
    assert file is not None
    return load_published(file, target, "cpu", torch.float32)


@pytest.mark.parametrize(
    "layout", [as_medusa, as_medusa_without_outputs, as_vllm, as_vllm_with_few_tokens, as_vllm_with_one_output]
)
def test_guesses_are_those_of_the_paper(tmp_path: Path, layout: Layout) -> None:
    heads, states = reference(), torch.randn(7, HIDDEN)
    loaded = load(saved(tmp_path, layout, heads), TARGET)
    own = torch.randn(VOCAB, HIDDEN)  # the model's output layer
    wanted = []
    for number, head in enumerate(heads):
        assert isinstance(head, nn.Sequential)
        output = {"as_medusa_without_outputs": own, "as_vllm_with_one_output": heads[0][-1].weight}  # type: ignore[index]
        logits = head[:-1](states) @ output.get(layout.__name__, head[-1].weight).T
        if layout is as_vllm_with_few_tokens:
            logits[:, :5] = float("-inf")
        wanted.append(logits.topk(3, dim=-1).indices)
        assert torch.allclose(loaded.hidden(states)[number], head[:-1](states), atol=1e-6)
    decoder: Any = SimpleNamespace(logits=lambda x: x @ own.T)
    found = loaded.best_tokens(states, torch.zeros(7, dtype=torch.int64), decoder, 3)
    assert torch.equal(found, torch.stack(wanted))
    assert loaded.tree.depth <= HEADS


def test_answers_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """Whatever random heads guess."""
    plain = LLM("demo-draft", device="cpu", dtype="float32", max_context=256)
    hidden = plain.engine.config.hidden
    folder = saved(tmp_path, as_medusa_without_outputs, reference(hidden, 8))
    llm = LLM("demo-draft", device="cpu", dtype="float32", max_context=256, speculative=f"medusa={folder},adaptive=off")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for prompt in ("a a a a a a a", "The theory of"):
        expected = plain.generate(prompt, params)[0].answers[0].token_ids
        assert llm.generate(prompt, params)[0].answers[0].token_ids == expected
    assert llm.engine.speculation.guessed > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("pickle", ("is a pickle", "weights_only=True", "medusa_lm_head.safetensors")),
        ("damaged", ("damaged", "download")),
        ("heads", ("3 medusa heads of 2 layers", "says 5")),
        ("missing", ("some missing",)),
        ("hidden", ("belong to another model", "[16")),
        ("vocabulary", ("output layer", "belong to another model")),
        ("outputs", ("output layers for the medusa heads [0, 2]",)),
        ("nan", ("NaN or Inf",)),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, change: str, words: tuple[str, ...]) -> None:
    name, tensors, config = as_medusa(reference())
    target = TARGET
    if change == "heads":
        config["medusa_num_heads"] = 5
    if change in ("missing", "outputs"):
        del tensors["1.0.linear.weight" if change == "missing" else "1.2.weight"]
    if change == "nan":
        tensors["0.0.linear.weight"][1, 1] = float("nan")
    if change == "hidden":
        target = Target("llama", 32, VOCAB, 2, "0" * 64)
        words = (words[0], "[32")
    if change == "vocabulary":
        target = Target("llama", HIDDEN, 41, 2, "0" * 64)
    folder = saved(tmp_path, lambda _: (name, tensors, config), nn.ModuleList())
    if change == "damaged":
        (folder / name).write_bytes(b"nothing")
    if change == "pickle":
        (folder / name).rename(folder / PICKLE)
    with pytest.raises(QuantkitError) as refused:
        load(folder, target)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_is_no_heads() -> None:
    assert find_published(model_folder("demo-draft")) is None
