"""The notebooks run from top to bottom without a GPU, and are text that jupytext reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def test_there_are_notebooks_of_cells() -> None:
    assert {file.stem for file in NOTEBOOKS} == {"add_a_method", "compare_formats"}
    for file in NOTEBOOKS:
        text = file.read_text(encoding="utf-8")
        assert "formats: ipynb,py:percent" in text.partition("# %%")[0]
        assert text.count("# %% [markdown]\n# ") >= 4
        assert text.count("\n# %%\n") >= 4


@pytest.mark.long
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "MPLBACKEND": "agg",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, file], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("KL ") == {"add_a_method": 3, "compare_formats": 6}[file.stem]
