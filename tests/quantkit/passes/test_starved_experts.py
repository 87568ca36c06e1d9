"""A text that never reaches some experts: rounding them by inputs of their block beats rounding them by none.

The model is random, its inputs are not: hidden states of every text lie near the same few directions, as those of
trained models do, and one more direction tells two texts apart. The router sends each text to experts of its own.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quantkit.arch import FAMILIES
from quantkit.blocks import BlockPart, BlockRunner, weight_of
from quantkit.checkpoint import Checkpoint
from quantkit.formats import CtPacked
from quantkit.methods.gptq import GptqMethod, quantize_layer
from quantkit.passes.activations import Activations
from quantkit.passes.experts import ExpertRounding
from tiny_models import build_model

HIDDEN, COMMON = 64, 12
OF_OTHER_TEXT = (2, 3)  # experts of the text that calibration does not see
FORMAT = CtPacked(bits=3, group_size=32, dtype="float32")


def text(sign: float, tokens: int, seed: int) -> Tensor:
    """Hidden states [1, tokens, hidden] of one of two texts."""
    common = torch.randn(COMMON, HIDDEN, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, COMMON, generator=random) @ common
    hidden += 0.3 * torch.randn(tokens, HIDDEN, generator=random)
    hidden[:, 0] = 8.0 * sign
    return hidden[None]


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> BlockPart:
    """The MLP of a layer whose router goes by the first channel."""
    model = build_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.post_attention_layernorm.weight.fill_(1.0)
        layer.mlp.gate.weight.zero_()
        for number in range(4):
            layer.mlp.gate.weight[number, 0] = (1.0 if number in OF_OTHER_TEXT else -1.0) * (2.0 + number)
    folder = tmp_path_factory.mktemp("starved")
    model.save_pretrained(folder)
    runner = BlockRunner(Checkpoint(folder), FAMILIES["qwen3_moe"])
    mlp: BlockPart = runner.load(0, runner.arguments(8)[0])[1]
    return mlp


@torch.no_grad()
@pytest.mark.parametrize("handful", [0, 6])
def test_inputs_of_the_block_beat_none(handful: int, part: BlockPart, tmp_path: Path) -> None:
    """Judged by what a starved expert gives for the text that needs it; the others are rounded by their own tokens."""
    calibration = torch.cat([text(-1, 400, seed=1), text(1, handful, seed=2)], dim=1)
    needed = part.route(text(1, 300, seed=3))
    assert set(needed.chosen.flatten().tolist()) == set(OF_OTHER_TEXT)
    hidden = Activations(torch.device("cpu"), "host", tmp_path)
    hidden.append(calibration)
    work = ExpertRounding(part, hidden, Activations(torch.device("cpu"), "host", tmp_path, "inputs"), GptqMethod())
    for number in range(4):
        weights, pooled, plain = [], [], []
        for stage in (each.by_expert[number] for each in part.routed_stages):
            statistics, notes = work._statistics(stage, number)
            starved = {"expert_tokens": handful, "pooled_tokens": 400 + handful}
            assert notes == (starved if number in OF_OTHER_TEXT else {"expert_tokens": 400})
            for name in stage.names:
                weight = weight_of(part.block.get_submodule(name))
                weights.append(weight)
                plain.append(FORMAT.quantize(weight).dequantize())
                found = quantize_layer(weight, FORMAT, statistics.require_hessian(), GptqMethod())
                pooled.append(found.quantized.dequantize())
        if number in OF_OTHER_TEXT:
            wanted = output(needed.inputs, *weights)
            errors = [float((output(needed.inputs, *rounded) - wanted).norm()) for rounded in (pooled, plain)]
            assert errors[0] < 0.8 * errors[1]


def output(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Of one expert."""
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
