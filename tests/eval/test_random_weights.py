"""Made-up weights of `bench engine`: at random, or zeros in all blocks."""

import pytest
import torch
from torch import Tensor

from quantkit.eval.engine import shapes
from quantkit.eval.engine.shapes import SHAPES, RandomWeights
from quantkit.eval.engine.start import start_shape
from quantkit.eval.kernels.cases import FORMATS
from quantkit.formats import CtMxfp4
from quantkit.kernels.linear.op import linear
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.experts import ExpertMlp, GroupedMlp
from quantkit.runtime.model.layers import DenseMlp, Weights
from quantkit.runtime.parallel.rank_memory import resident_bytes


@pytest.mark.parametrize("zeros", [False, True])
def test_zeros_are_zeros(zeros: bool) -> None:
    made = _weights(None, zeros)
    for block in made.blocks:
        for layer in block.linears:
            for weight in layer.weights:
                assert isinstance(weight, Tensor)
                assert bool((weight == 0).all()) == zeros
    assert made.embedding.any()  # tokens must differ, or attention has nothing to do


def test_quantized_zeros_mean_zeros() -> None:
    made = _weights("w4", True)
    x = torch.randn(3, made.embedding.shape[1])
    for weight in made.blocks[0].qkv.weights:
        assert not isinstance(weight, Tensor)
        assert not linear(x, weight).any()


@pytest.mark.parametrize("name", [None, "w4", "nf4", "llm-int8", "fp8-block"])
def test_experts(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other on a CPU; as a GPU has them, stacked."""
    for block in _weights(name, False, "tiny-experts").blocks:
        assert isinstance(block.mlp, ExpertMlp)
        assert len(block.mlp.experts) == 4
    monkeypatch.setattr(shapes, "has_routed_kernels", lambda device: True)
    for block in _weights(name, False, "tiny-experts").blocks:
        assert isinstance(block.mlp, GroupedMlp)
        assert (block.mlp.gate_up.count, block.mlp.gate_up.outputs, block.mlp.gate_up.inputs) == (8, 128, 256)
        assert (block.mlp.down.count, block.mlp.down.outputs, block.mlp.down.inputs) == (4, 256, 128)
        assert block.mlp.share_of_token == 0.5


def test_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gpt-oss is published: 16 bits but for experts, biases and sinks; inputs that 128 does not divide."""
    small = {"hidden_size": 160, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4}
    config, device = read_model_config(SHAPES["gpt-oss-20b"] | small), torch.device("cpu")
    monkeypatch.setattr(shapes, "has_routed_kernels", lambda device: True)
    random = RandomWeights(config, CtMxfp4(), torch.bfloat16, device, experts_alone=True)
    made = random.load()
    for block in made.blocks:
        assert isinstance(block.qkv.weights[0], Tensor)
        assert None not in (block.qkv.bias, block.output.bias, block.sinks)
        assert isinstance(block.mlp, GroupedMlp)
        assert block.mlp.clip == (7.0, 1.702)
        assert block.mlp.gate_up.kind == "e2m1-g32"
        assert block.mlp.gate_up.bias is not None
        assert block.mlp.gate_up.bias.shape == (8, 96)
    assert random.nbytes() < resident_bytes(made)


@pytest.mark.parametrize("name", [None, "w4"])
def test_latents(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes keys and values is never quantized; a dense layer, then one with a shared expert."""
    for stacked in (False, True):
        monkeypatch.setattr(shapes, "has_routed_kernels", lambda device, stacked=stacked: stacked)
        dense, routed = _weights(name, False, "tiny-latents").blocks
        assert isinstance(dense.mlp, DenseMlp)
        assert isinstance(routed.mlp, GroupedMlp if stacked else ExpertMlp)
        assert routed.mlp.shared is not None
        assert routed.mlp.correction is not None
        assert routed.latent is not None
        assert (routed.latent.key_up.shape, routed.latent.value_up.shape) == ((4, 32, 128), (4, 32, 128))
        assert routed.latent.q_b is not None
        assert routed.latent.q_b.outputs == 4 * 48


def test_an_engine_of_latents_answers() -> None:
    options = EngineOptions(device="cpu", max_context=64, kv_tokens=128, max_sequences=2)
    engine, _ = start_shape("tiny-latents", None, options, first=True)
    assert engine.runner.cache.pages.shape[-1] == 128 + 16


@pytest.mark.parametrize("shape", ["tiny-experts", "tiny-latents"])
def test_bytes_are_those_of_what_is_made(shape: str) -> None:
    random = RandomWeights(read_model_config(SHAPES[shape]), None, torch.float32, torch.device("cpu"))
    norms = 2 * (256 + 64) * 4 + 256 * 4  # which two layers share where they are alike, and the last one
    norms += 2 * 2 * 128 * 4 + 4 * 4 if shape == "tiny-latents" else 0  # of latents, and a correction
    assert 0 <= resident_bytes(random.load()) - random.nbytes() <= norms


def _weights(format_name: str | None, zeros: bool, shape: str = "tiny") -> Weights:
    fmt = None if format_name is None else FORMATS[format_name]("float32")
    config = read_model_config(SHAPES[shape])
    return RandomWeights(config, fmt, torch.float32, torch.device("cpu"), zeros=zeros).load()
