"""How lm-eval gets the items of this folder, from wherever the command runs: the YAML files name this function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(file: str, **_: Any) -> dict[str, Any]:
    """The splits of a task whose items stand in a file beside this one. lm-eval passes the task's metadata too."""
    from datasets import Dataset

    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    return {"test": Dataset.from_list([json.loads(line) for line in text.splitlines()])}
