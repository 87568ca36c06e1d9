"""What must not be imported, as it takes seconds and memory: an engine that serves token ids knows nothing of text,
one on a CPU nothing of compilers for GPUs, and matplotlib waits until a report is written."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

import torch

from quantkit.eval.shapes import PLAIN_SHAPES
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.model.rope import rope_tables
from quantkit.runtime.startup import start_engine

engine = start_engine("demo", EngineOptions(device="cpu"))
engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
while engine.unfinished:
    engine.step()
llama = PLAIN_SHAPES["llama-3.1-8b"]
rope_tables(llama, read_model_config(llama), 8, torch.device("cpu"))
print([name for name in ("transformers", "tokenizers", "datasets", "triton", "torch._dynamo") if name in sys.modules])

import quantkit.eval.report.write

print("matplotlib" in sys.modules)
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Of one process for both questions."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_engine_imports_no_transformers(printed: list[str]) -> None:
    assert printed[0] == "[]"


def test_matplotlib_waits_until_a_report_is_written(printed: list[str]) -> None:
    assert printed[1] == "False"
