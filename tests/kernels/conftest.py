"""Every kernel test runs twice in its life: under Triton's interpreter on a CPU, compiled on a GPU (make test-gpu)."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
