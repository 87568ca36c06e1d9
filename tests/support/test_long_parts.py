"""Every long test runs in exactly one part, and no part takes much longer than another."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from long_parts import PARTS, RAY, SECONDS, deal, entry_of, in_part, weight

TESTS = Path(__file__).parents[1]


def files_with(*words: str) -> set[str]:
    """Test files that have one of these, as the Makefile looks for them."""
    texts = {file: file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py")}
    files = (file for file, text in texts.items() if any(word in text for word in words))
    return {str(file.relative_to(TESTS.parent)) for file in files} - {str(Path(__file__).relative_to(TESTS.parent))}


def item(name: str, *marks: str) -> Any:
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark if mark in marks else None)


def test_the_table_has_every_file_with_long_tests_and_no_other() -> None:
    assert {entry.partition("::")[0] for entry in SECONDS} == files_with("mark.long", "from long_cases")
    assert files_with("mark.ray") == RAY


@pytest.mark.parametrize("more", [(), ("tests/new/test_a.py", "tests/new/test_b.py")])
def test_every_file_is_in_one_part(more: tuple[str, ...]) -> None:
    parts = deal(more)
    assert len(parts) == PARTS
    assert sorted(file for part in parts for file in part) == sorted({*SECONDS, *more})
    assert deal(reversed(more)) == parts


def test_parts_are_balanced() -> None:
    weights = [sum(map(weight, part)) for part in deal()]
    assert max(weights) < 1.15 * sum(weights) / PARTS
    assert all(set(part) - RAY for part in deal())  # what runs two at a time: an empty run would be an error


def test_every_long_test_runs_in_one_part() -> None:
    """Tests of one file stay together, those that are not long stay out, whatever files a run collects."""
    files = [*{entry.partition("::")[0] for entry in SECONDS}, "tests/new/test_a.py"]
    long = [item(f"{file}::test_{name}", "long") for file in files for name in "ab"]
    short = [item(f"{file}::test_short") for file in files]
    parts = [in_part(short + long, part + 1) for part in range(PARTS)]
    assert sorted(one.nodeid for part in parts for one in part) == sorted(one.nodeid for one in long)
    for part in parts:
        assert all(sum(one.nodeid.startswith(file) for one in part) in (0, 2) for file in files)


def test_a_test_with_an_entry_of_its_own_is_dealt_alone() -> None:
    """Also when xdist has written its group behind the name; other tests of that file belong to the file."""
    own = [entry for entry in SECONDS if "::" in entry]
    file = own[0].partition("::")[0]
    long = [item(f"{entry}@a group", "long") for entry in own] + [item(f"{file}::test_other", "long")]
    parts = [{entry_of(one.nodeid) for one in in_part(long, part + 1)} for part in range(PARTS)]
    assert sorted(entry for part in parts for entry in part) == sorted([*own, file])
    assert all(part - {file} for part in parts)  # every part compiles some
