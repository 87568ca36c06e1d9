"""Rotated models answer as the original, in every family where that is possible; the others are refused."""

from pathlib import Path

import pytest
import torch

from quantkit.errors import InputError
from quantkit.eval.rotation import orthogonal, rotate_model
from quantkit.reference import load_reference
from tiny_models import save_model


@pytest.mark.parametrize("size", [1, 6, 64, 96])
def test_the_matrix_is_orthogonal(size: int) -> None:
    matrix = orthogonal(size, seed=3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3_moe"])
def test_the_same_answers(family: str, tmp_path: Path) -> None:
    """Biases, layers fused in the files, experts with a router; norms that are not 1."""
    model = save_model(family, tmp_path / "model")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    model.save_pretrained(tmp_path / "model")
    rotate_model(tmp_path / "model", tmp_path / "rotated", residual=True, values=True, dtype="float32")
    tokens = torch.randint(0, 64, (1, 24))
    before, after = (load_reference(tmp_path / name, "float32") for name in ("model", "rotated"))
    torch.testing.assert_close(after(tokens).logits, before(tokens).logits, rtol=1e-4, atol=1e-4)
    name = f"model.layers.0.self_attn.{'qkv' if family == 'phi3' else 'v'}_proj.weight"
    assert not torch.allclose(after.get_parameter(name), before.get_parameter(name), atol=1e-2)


@pytest.mark.parametrize(
    ("family", "words"), [("gemma2", "has norms after its layers"), ("deepseek_v3", "latent attention")]
)
def test_what_cannot_be_rotated(family: str, words: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model")
    with pytest.raises(InputError, match=words):
        rotate_model(tmp_path / "model", tmp_path / "rotated", residual=True, values=False)
