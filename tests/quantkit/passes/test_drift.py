"""What a method is told of how far inputs are from those of the model that is not quantized."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit import working_memory
from quantkit.arch import LLAMA, MIXTRAL, Family
from quantkit.checkpoint import Checkpoint
from quantkit.formats import CtPacked, Format
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.method import Method, Rounded
from quantkit.methods.statistics import InputStatistics
from quantkit.passes import CalibratedPass

LAYERS, LENGTH = 2, 32
FMT = CtPacked(bits=3, group_size=32, dtype="float32")
seen: list[Tensor | None] = []


@dataclass(frozen=True)
class Watching(GptqMethod):
    """Remembers the drift that it is given."""

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        seen.append(None if inputs.drift is None else inputs.drift.clone())
        return super().round(weight, fmt, inputs)


@dataclass(frozen=True)
class Chosen(GptqMethod):
    """Two candidates that are alike."""

    @property
    def candidates(self) -> Mapping[str, Method]:
        alone = Watching(**{field.name: getattr(self, field.name) for field in fields(self)})
        return {"first": alone, "second": alone}


def begin(family: Family, folder: Path, tokens: Tensor, method: GptqMethod) -> CalibratedPass:
    source = Checkpoint(folder)
    chosen = dict.fromkeys(family.linears(source.config), FMT)
    work = CalibratedPass(source, family, chosen, method, "cpu", folder.parent)
    work.begin(tokens)
    seen.clear()
    return work


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, 96, (9, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scaling", ["none", "awq"])
def test_is_what_quantized_layers_before_changed(
    save_model: Callable[..., Any], tmp_path: Path, tokens: Tensor, scaling: str
) -> None:
    """Of what query, key and value layers read: nothing in the first block, then as in two whole models."""
    model = save_model(LLAMA, tmp_path / "model", num_hidden_layers=LAYERS)

    @torch.no_grad()
    def read(layer: int) -> Tensor:
        hidden = model(tokens, use_cache=False, output_hidden_states=True).hidden_states[layer]
        normed: Tensor = model.model.layers[layer].input_layernorm(hidden)
        return normed.flatten(0, 1)

    exact = read(1)
    work = begin(LLAMA, tmp_path / "model", tokens, Watching(target="model", scaling=scaling))
    blocks = work.blocks(lambda _: None)
    first = next(blocks)
    with torch.no_grad():
        for layer in first.layers:
            model.get_parameter(f"{layer.module}.weight").copy_(layer.quantized.dequantize())
        for name, weight in first.changed.items():
            model.get_parameter(name).copy_(weight)
    expected = (exact - read(1)).T @ read(1)
    second = next(blocks)
    assert seen[0] is not None
    assert not seen[0].any()
    found = seen[len(seen) // 2]
    assert found is not None
    if scaling == "awq":  # statistics are divided with the inputs
        norm = "model.layers.1.input_layernorm.weight"
        scales = model.get_parameter(norm).detach() / second.changed.get(norm, model.get_parameter(norm).detach())
        found = found * scales * scales[:, None]
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_experts_have_none_and_are_rounded_as_before(
    save_model: Callable[..., Any], tmp_path: Path, tokens: Tensor
) -> None:
    save_model(MIXTRAL, tmp_path / "model", num_hidden_layers=1)
    method = Watching(target="model")
    (found,) = begin(MIXTRAL, tmp_path / "model", tokens, method).blocks(lambda _: None)
    assert [drift is None for drift in seen] == [False, False, *[True] * (len(seen) - 2)]
    (plain,) = begin(MIXTRAL, tmp_path / "model", tokens, replace(method, target="layer")).blocks(lambda _: None)
    for one, other in zip(found.layers[:3], plain.layers[:3], strict=True):  # nothing was quantized before them
        assert torch.equal(one.quantized.dequantize(), other.quantized.dequantize())


@pytest.mark.parametrize("scaling", ["none", "awq"])
def test_a_candidate_is_told_what_it_would_be_told_alone(
    save_model: Callable[..., Any], tmp_path: Path, tokens: Tensor, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever candidates before it made of the block; in the last block, which has blocks before it."""
    monkeypatch.setattr(working_memory, "BATCH_TOKENS", LENGTH)  # H is summed in the same order with some held back
    save_model(LLAMA, tmp_path / "model", num_hidden_layers=LAYERS)
    options: dict[str, Any] = {"target": "model", "scaling": scaling, "grid": "minmax"}
    alone = list(begin(LLAMA, tmp_path / "model", tokens, Watching(**options)).blocks(lambda _: None))
    work = begin(LLAMA, tmp_path / "model", tokens, Chosen(**options))
    chosen = list(work.blocks(lambda _: None))
    for one, other in zip(alone, chosen, strict=True):
        (errors,) = {str(layer.log["block_errors"]) for layer in other.layers}
        first, second = json.loads(errors.replace("'", '"')).values()
        assert first == second
        for layer, same in zip(one.layers, other.layers, strict=True):
            assert torch.equal(layer.quantized.dequantize(), same.quantized.dequantize())
    assert seen[-1] is not None
    assert seen[-1].any()
