"""What a start must not import, because it takes seconds: an engine that serves token ids knows nothing of text."""

import subprocess
import sys

PROGRAM = """
import sys

import torch

from quantkit.eval.shapes import PLAIN_SHAPES
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.rope import rope_tables
from quantkit.runtime.startup import start_engine

start_engine("demo", EngineOptions(device="cpu"))
llama = PLAIN_SHAPES["llama-3.1-8b"]
rope_tables(llama, read_model_config(llama), 8, torch.device("cpu"))
print([name for name in ("transformers", "tokenizers", "datasets") if name in sys.modules])
"""


def test_an_engine_imports_no_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
