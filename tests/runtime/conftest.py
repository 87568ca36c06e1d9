"""What several tests of engines share."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.sources import model_folder


@pytest.fixture(scope="session")
def noisy_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smaller bundled model with noise in its weights: as a draft of that model it guesses well, and not always."""
    folder = Path(shutil.copytree(model_folder("demo-draft"), tmp_path_factory.mktemp("drafts") / "noisy"))
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=random)
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
