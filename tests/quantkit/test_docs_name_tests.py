"""Where a page says which test proves a claim, that test is there."""

import ast
import re
from pathlib import Path

import pytest

from pages import PAGES, ROOT

_NAMED = re.compile(
    r"(?<![\w/.-])(?P<path>(?:[\w-]+/)*test_\w+\.py|tests/[\w/]+(?:\.py)?)(?:::(?P<test>\w+))?(?![\w/]*\.\w)"
)
NAMED = sorted(
    {(page, found["path"], found["test"]) for page, text in PAGES.items() for found in _NAMED.finditer(text)}, key=str
)


def places(path: str) -> list[Path]:
    """Files of a whole path, of one below tests/, or of a bare name."""
    if "/" not in path:
        return list((ROOT / "tests").rglob(path))
    return [place for place in (ROOT / path, ROOT / "tests" / path) if place.exists()]


def functions_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)}  # fmt: skip


@pytest.mark.parametrize(("page", "path", "test"), NAMED)
def test_every_test_that_a_page_names_is_there(page: str, path: str, test: str | None) -> None:
    found = places(path)
    assert found, f"{page} names {path}, which is not there"
    assert test is None or any(test in functions_in(file) for file in found), f"{page} names {path}::{test}"


def test_names_of_every_kind_are_found() -> None:
    """A pattern that finds nothing would prove nothing."""
    assert ("docs/reference/security.md", "tests/long/test_soak.py", "test_soak") in NAMED
    assert ("docs/explanations/engine.md", "test_speculative_sampling.py", None) in NAMED
    assert ("docs/contributing/testing.md", "tests/support/long_parts.py", None) in NAMED
    assert ("docs/explanations/scaling.md", "tests/runtime/parallel/", None) in NAMED
    assert not places("test_that_nobody_wrote.py")
    assert not places("runtime/test_that_nobody_wrote.py")
