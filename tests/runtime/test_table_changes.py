"""What the device is told of page numbers: all that changed, and nothing is looked at that cannot have changed."""

from types import SimpleNamespace
from typing import Any

from quantkit.runtime.device.step_inputs import TableChanges

WIDTH = 8


class Looked(list[int]):
    """Pages that nobody may compare."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("all pages were compared")

    def __getitem__(self, at: Any) -> Any:
        assert not isinstance(at, slice) or (at.start or 0) > 0, "all pages were copied"
        return super().__getitem__(at)


def plan(row: int, pages: list[int], number: int = 0, stay: int = 0, replaced: int = 0) -> Any:
    sequence = SimpleNamespace(id=number, row=row, pages=pages, num_preemptions=stay, num_replaced=replaced)
    return SimpleNamespace(scheduled=[SimpleNamespace(sequence=sequence)])


def test_pages_that_only_become_more_are_not_compared() -> None:
    changes = TableChanges(2, WIDTH)
    assert changes.of(plan(1, [5, 6])) == ([8, 9], [5, 6])
    assert changes.of(plan(1, Looked([5, 6]))) == ([], [])
    assert changes.of(plan(1, Looked([5, 6, 7]))) == ([10], [7])


def test_a_page_that_was_taken_away_and_came_back_as_another() -> None:
    changes = TableChanges(1, WIDTH)
    changes.of(plan(0, [5, 6, 7]))
    assert changes.of(plan(0, [5, 6], replaced=1)) == ([], [])
    assert changes.of(plan(0, [5, 6, 9], replaced=1)) == ([2], [9])
    assert changes.of(plan(0, [5, 3, 9], replaced=2)) == ([0, 1, 2], [5, 3, 9])


def test_a_row_with_another_owner_and_one_that_was_forgotten() -> None:
    changes = TableChanges(1, WIDTH)
    changes.of(plan(0, [5, 6]))
    assert changes.of(plan(0, [6, 5], number=1)) == ([0, 1], [6, 5])
    assert changes.of(plan(0, [2, 5], number=1, stay=1)) == ([0, 1], [2, 5])
    changes.forget()
    assert changes.of(plan(0, [2, 5], number=1, stay=1)) == ([0, 1], [2, 5])
