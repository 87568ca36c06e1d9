"""The bundled model over gloo, in its main formats: real processes give the tokens of one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.sources import model_folder

# `test_engine_parallel.py` has real processes in every run.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("parallel decoder processes")]

SCRIPT = Path(__file__).with_name("decoder_rank.py")
ACT_ORDER = ("method.order=desc_act", "format.act_order=true")
DEMO_RECIPES = {"gptq": ("gptq-w4g64", ACT_ORDER), "awq": ("awq-w4g128", ()), "nf4": ("nf4", ())}
DEMO_RECIPES |= {"llm-int8": ("llm-int8", ()), "fp8": ("fp8", ())}
SHAPES = ((2, 1), (1, 2), (2, 2))


def load_script() -> Any:
    spec = spec_from_file_location("decoder_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["decoder_rank"] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


rank_of = load_script()


@dataclass(frozen=True)
class GlooRuns:
    """What four processes found, job by job."""

    jobs: list[dict[str, Any]]
    found: list[list[dict[str, Any] | None]]  # by rank

    def of(self, folder: Path, tensor: int, pipeline: int) -> list[dict[str, Any]]:
        place = next(
            place
            for place, job in enumerate(self.jobs)
            if (job["folder"], job["tensor"], job["pipeline"]) == (str(folder), tensor, pipeline)
        )
        return [result for by_rank in self.found if (result := by_rank[place]) is not None]


@pytest.fixture(scope="module")
def demo_folders(quantized_demo: Callable[..., Path]) -> dict[str, Path]:
    made = {name: quantized_demo(recipe, *changes) for name, (recipe, changes) in DEMO_RECIPES.items()}
    return {"bf16": model_folder("demo"), **made}


@pytest.fixture(scope="module")
def gloo(demo_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> GlooRuns:
    """One group of processes for all jobs: starting them takes longer than the jobs."""
    folder = tmp_path_factory.mktemp("gloo")
    shapes = [(path, *shape) for path in demo_folders.values() for shape in SHAPES]
    shapes.append((demo_folders["bf16"], 4, 1))  # more ranks than KV heads
    jobs = [
        {"folder": str(path), "tensor": tensor, "pipeline": pipeline, "prompts": rank_of.prompts_below(4096)}
        for path, tensor, pipeline in shapes
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, SCRIPT, str(rank), "4", folder], env=environment, stderr=subprocess.PIPE)
        for rank in range(4)
    ]
    try:
        ends = [(rank.communicate(timeout=400)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(code for _, code in ends), "\n".join(text.decode() for text, _ in ends)
    return GlooRuns(jobs, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)])


@pytest.mark.parametrize("name", ["bf16", *DEMO_RECIPES])
def test_processes_give_the_tokens_of_one(name: str, demo_folders: dict[str, Path], gloo: GlooRuns) -> None:
    expected, weights = rank_of.alone(demo_folders[name], rank_of.prompts_below(4096))
    blocks = rank_of.weight_bytes(weights.blocks)
    for tensor, pipeline in SHAPES:
        found = gloo.of(demo_folders[name], tensor, pipeline)
        assert len(found) == tensor * pipeline
        for first_stage in found[:tensor]:  # every rank that has a head
            assert first_stage["tokens"] == expected.tokens
            assert_close(torch.tensor(first_stage["logits"]), expected.logits, exact=tensor == 1)
        held = [rank["blocks"] for rank in found]
        assert sum(held) < 1.03 * blocks
        assert max(held) < 1.03 * blocks * (0.6 if pipeline == 2 else 1) / tensor  # of five blocks, two and three


def test_more_processes_than_kv_heads(demo_folders: dict[str, Path], gloo: GlooRuns) -> None:
    expected, _ = rank_of.alone(demo_folders["bf16"], rank_of.prompts_below(4096))
    for rank in gloo.of(demo_folders["bf16"], 4, 1):
        assert rank["tokens"] == expected.tokens
        assert_close(torch.tensor(rank["logits"]), expected.logits, exact=False)


def assert_close(found: Tensor, expected: Tensor, *, exact: bool) -> None:
    """A stage hands over all that the next one needs, so stages change nothing at all; sums are added in parts."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else 1e-4)
