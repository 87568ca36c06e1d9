"""Made-up weights of `bench engine`: at random, or zeros in all blocks."""

import pytest
import torch
from torch import Tensor

from quantkit.eval.engine.shapes import SHAPES, RandomWeights
from quantkit.eval.kernels.cases import FORMATS
from quantkit.kernels.linear.op import linear
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.layers import Weights


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


def _weights(format_name: str | None, zeros: bool) -> Weights:
    fmt = None if format_name is None else FORMATS[format_name]("float32")
    config = read_model_config(SHAPES["tiny"])
    return RandomWeights(config, fmt, torch.float32, torch.device("cpu"), zeros=zeros).load()
