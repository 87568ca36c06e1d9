"""Peers: the other packages that read our checkpoints. Without them these tests skip themselves.

make test-interop runs them in an environment of their own, with `pip install 'quantkit[interop]'`.
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

# Read by the peers when they are imported: small machines need the first two.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _peer(*names: str) -> ModuleType:
    """The first of these modules; skips when one of them is not installed. Their warnings are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            modules = [importlib.import_module(name) for name in names]
        except ImportError as error:
            pytest.skip(f"needs {names[0].split('.')[0]}: pip install 'quantkit[interop]' ({error})")
    return modules[0]


@pytest.fixture(scope="session")
def bnb() -> ModuleType:
    return _peer("bitsandbytes.functional")


@pytest.fixture(scope="session")
def ct() -> ModuleType:
    return _peer("compressed_tensors.compressors", "compressed_tensors.quantization")


@pytest.fixture(scope="session")
def gptqmodel() -> ModuleType:
    return _peer("gptqmodel.nn_modules.qlinear.torch", "gptqmodel.nn_modules.qlinear.torch_awq", "optimum.gptq")


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def model() -> Path:
    """The model that is quantized and loaded. A small one: peers are slow without 16-bit arithmetic."""
    return model_folder("demo-draft")


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """Token ids [2, 64] of held-out text."""
    text = HELDOUT_TEXT.read_text(encoding="utf-8")[:2000]
    ids = load_tokenizer("demo-draft")(text, add_special_tokens=False, verbose=False)
    return torch.tensor(ids["input_ids"][:128]).view(2, 64)
