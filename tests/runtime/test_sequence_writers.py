"""Each field of a `Sequence` has one writer (core/sequence.py): no other stage assigns to it."""

import ast
from pathlib import Path

import pytest

from quantkit.runtime.core.sequence import Sequence

RUNTIME = Path(__file__).parents[2] / "runtime"
SCHEDULER = {"status", "finish_reason", "row", "pages", "num_replaced", "digests", "num_computed", "num_published",
             "num_pending", "num_reused", "num_preemptions", "swapped"}  # fmt: skip
SPECULATION = {"speculates", "draft", "ahead", "tree", "num_guessed", "num_accepted"}
WRITERS = {
    "engine/engine.py": {"tokens", "started"},
    "engine/scheduler.py": SCHEDULER,
    "engine/prefix_sharing.py": SCHEDULER,  # the scheduler's helper
    "engine/speculation.py": SPECULATION,
}


NAMES = {"sequence", "one", "victim", "leader"}  # that a sequence goes by


def assigned(file: Path) -> set[str]:
    """Attributes of sequences that a file assigns to."""
    stored = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
              if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))  # fmt: skip
    return {node.attr for node in stored if ast.unparse(node.value).rpartition(".")[2] in NAMES}


@pytest.mark.parametrize("folder", ["model", "sampling", "output", "device", "engine", "drafters", "parallel"])
def test_a_stage_writes_its_own_fields(folder: str) -> None:
    fields = set(Sequence.__dataclass_fields__)
    for file in sorted((RUNTIME / folder).glob("*.py")):
        allowed = WRITERS.get(f"{folder}/{file.name}", set())
        foreign = assigned(file) & fields - allowed
        assert not foreign, f"{file.name} writes {', '.join(sorted(foreign))}, which another stage writes"


def test_every_field_that_changes_is_written() -> None:
    written = {name: assigned(RUNTIME / name) for name in WRITERS}
    assert "started" in written["engine/engine.py"]
    assert SCHEDULER - {"digests"} <= written["engine/scheduler.py"]  # `digest_of` appends those
    assert written["engine/speculation.py"] >= SPECULATION
