"""Task items that do not ship, such as 200 of ARC or LAMBADA: the engine equals lm-eval's `hf` model on each of them.

QUANTKIT_TASKS names a folder with YAML tasks whose data are local files (docs/reference/tasks.md),
QUANTKIT_TASKS_MODEL a model.
"""

import os
from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval")

from quantkit.eval.tasks.run import run_tasks

FOLDER = os.environ.get("QUANTKIT_TASKS", "")
MODEL = os.environ.get("QUANTKIT_TASKS_MODEL", "demo")


@pytest.mark.long
@pytest.mark.skipif(not FOLDER, reason="QUANTKIT_TASKS names no folder with tasks")
def test_first_200_items_equal_the_hf_model() -> None:
    files = sorted(Path(FOLDER).glob("*.yaml"))
    tasks = [yaml.safe_load(file.read_text(encoding="utf-8"))["task"] for file in files]
    ours, theirs = (
        run_tasks(MODEL, tasks, task_path=FOLDER, limit=200, device="cpu", dtype="float32", backend=backend,
                  with_samples=True)
        for backend in ("runtime", "reference")
    )  # fmt: skip
    assert ours.samples is not None
    assert theirs.samples is not None
    differences = []
    for task in tasks:
        for mine, other in zip(ours.samples[task], theirs.samples[task], strict=True):
            assert mine["doc"] == other["doc"]
            for (found,), (expected,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(found, str):
                    assert found == expected
                else:
                    assert found[1] == expected[1]
                    differences.append(abs(found[0] - expected[0]))
    for score in (*ours.scores, *theirs.scores):
        print(score)
    print(f"{len(differences)} log-likelihoods, largest difference {max(differences, default=0):.2e}")
    assert max(differences, default=0) < 1e-2
    assert [score.value for score in ours.scores] == pytest.approx([score.value for score in theirs.scores], rel=1e-3)
