"""Peers: the other packages that read our checkpoints. Without them these tests skip themselves.

make test-interop runs them in an environment of their own, with `pip install 'quantkit[interop]'`.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

# Read by the peers when they are imported: small machines need the first two.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 1024


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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all checkpoints are made of: the bundled one, or a small random one where it is missing."""
    import quantkit.bundled

    (bundled,) = quantkit.bundled.__path__
    demo = Path(bundled) / "demo"
    return demo if (demo / "model.safetensors").exists() else _random_model(tmp_path_factory.mktemp("model"))


def _random_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.03,  # every layer moves the logits by 7% or more, bfloat16 by less than 1%
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokens(model: Path) -> torch.Tensor:
    """Token ids [2, 128]. Weights are compared through the logits they give, so any ids will do."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return torch.randint(0, vocabulary, (2, 128), generator=torch.Generator().manual_seed(0))
