"""Layers with inputs as calibration sees them: correlated, with a few large columns."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor]  # a weight [out, in] and the inputs [tokens, in] of its layer


def _layer(seed: int, inputs: int = 256, outputs: int = 48, tokens: int = 1024) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    seen = torch.randn(tokens, inputs, generator=generator) @ mix
    seen[:, :5] *= 8
    return weight, seen


@pytest.fixture
def layer() -> Callable[..., Layer]:
    """`layer(seed, inputs=256, outputs=48, tokens=1024)`."""
    return _layer
