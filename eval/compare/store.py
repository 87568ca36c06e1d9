"""Results on disk, one file for each format: what is measured is not measured again.

A file has a key: a digest of everything that decides its numbers. A file with another key belongs to another question
and is started anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint import Checkpoint
from quantkit.eval.compare.asked import Asked, Entry
from quantkit.eval.compare.results import FormatResult
from quantkit.eval.kernels.results import versions
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder


@dataclass(frozen=True)
class Store:
    """The file of one format."""

    file: Path
    key: str

    def read(self) -> FormatResult | None:
        """What was measured, unless for another question."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            return FormatResult.from_dict(found["result"]) if found["key"] == self.key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, result: FormatResult) -> None:
        """At once or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        text = json.dumps({"key": self.key, "result": result.to_dict()}, indent=1, ensure_ascii=False)
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.file)


def store_of(output: Path, asked: Asked, entry: Entry, device_name: str) -> Store:
    decides: dict[str, Any] = asked.to_dict() | {"entry": entry.name, "kind": entry.kind, "on": device_name}
    decides |= versions()
    if not asked.of_shape:
        decides["model_files"] = _files(asked.model)
    if entry.kind == "recipe":
        decides["recipe"] = load_recipe(entry.source).to_dict()
    if entry.kind == "checkpoint":
        decides["checkpoint_files"] = _files(entry.source)
    text = json.dumps(decides, sort_keys=True)
    return Store(output / "measured" / f"{entry.name}.json", hashlib.sha256(text.encode()).hexdigest())


def _files(model: str) -> dict[str, list[int]]:
    files = sorted({stored.file for stored in Checkpoint(model_folder(model)).tensors.values()})
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
