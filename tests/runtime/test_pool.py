"""Pages of the cache: who gets which, what is kept of those that nobody holds, and that wrong use is noticed."""

from collections.abc import Callable

import pytest

from quantkit.runtime.core.pages import PADDING_PAGE, page_digest
from quantkit.runtime.engine.page_pool import PagePool


def pool_of(usable: int, share_prefixes: bool = True) -> PagePool:
    return PagePool(usable + 1, 4, share_prefixes)


def filled(pool: PagePool, *names: bytes) -> list[int]:
    """One published page for each name; nobody holds them in the end, the first was let go first."""
    pages = pool.allocate(len(names))
    assert pages is not None
    for page, name in zip(pages, names, strict=True):
        pool.publish(page, name)
    for page in pages:
        pool.release([page])
    return pages


def test_allocation_gives_all_or_nothing() -> None:
    pool = pool_of(5)
    first = pool.allocate(3)
    assert first is not None
    assert len(set(first)) == 3
    assert PADDING_PAGE not in first
    assert pool.allocate(3) is None
    assert pool.free == 2
    second = pool.allocate(2)
    assert second is not None
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    pool.release(first)
    assert pool.free == 3
    pool.check_integrity([second])


def test_pages_are_forgotten_in_the_order_in_which_they_were_let_go() -> None:
    pool = pool_of(3)
    pages = filled(pool, b"a", b"b", b"c")
    pool.hold([pages[0]])  # used again: now the last one
    pool.release([pages[0]])
    for expected, name in ((pages[1], b"b"), (pages[2], b"c"), (pages[0], b"a")):
        assert pool.find(name) == expected
        assert pool.allocate(1) == [expected]
        assert pool.find(name) is None
    assert pool.evictions == 3


def test_pages_without_contents_go_first() -> None:
    pool = pool_of(4)
    kept = filled(pool, b"a", b"b")
    empty = pool.allocate(2)
    assert empty is not None
    pool.release(empty)
    taken = pool.allocate(2)
    assert taken is not None
    assert sorted(taken) == sorted(empty)
    assert pool.evictions == 0
    assert [pool.find(b"a"), pool.find(b"b")] == kept


def test_the_end_of_a_sequence_goes_before_its_beginning() -> None:
    """A beginning serves more others than an end."""
    pool = pool_of(3)
    pages = pool.allocate(3)
    assert pages is not None
    for page, name in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.publish(page, name)
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]
    assert pool.allocate(1) == [pages[1]]
    assert pool.find(b"a") == pages[0]


def test_a_page_that_nobody_holds_can_be_held_again() -> None:
    pool = pool_of(2)
    first, second = filled(pool, b"a", b"b")
    pool.hold([first])
    assert pool.free == 1
    assert not pool.is_shared(first)
    pool.hold([first])
    assert pool.is_shared(first)
    assert pool.allocate(1) == [second]
    assert pool.allocate(1) is None
    pool.check_integrity([[first], [first, second]])
    pool.release([first])
    assert pool.free == 0
    pool.release([first])
    assert pool.free == 1
    assert pool.find(b"a") == first


def test_the_first_of_equal_pages_serves() -> None:
    pool = pool_of(2)
    pages = pool.allocate(2)
    assert pages is not None
    pool.publish(pages[0], b"a")
    pool.publish(pages[1], b"a")
    assert pool.find(b"a") == pages[0]
    pool.publish(pages[0], b"other")  # a page has one meaning
    assert pool.find(b"other") is None
    pool.release(pages)
    assert pool.allocate(1) == [pages[1]]  # it was never published
    pool.check_integrity([[pages[1]]])


def test_nothing_is_found_where_prefixes_are_not_shared() -> None:
    pool = pool_of(2, share_prefixes=False)
    filled(pool, b"a", b"b")
    assert pool.find(b"a") is None
    assert pool.allocate(2) is not None
    assert pool.evictions == 0


def test_contents_can_be_forgotten_at_once() -> None:
    pool = pool_of(3)
    pages = filled(pool, b"a", b"b")
    pool.hold(pages[:1])
    pool.reset_contents()
    assert pool.find(b"a") is None
    assert pool.find(b"b") is None
    pool.check_integrity([pages[:1]])
    assert pool.allocate(2) is not None
    assert pool.evictions == 0


def test_digests_chain() -> None:
    """Equal tokens behind other tokens are another page."""
    first = page_digest(b"", [1, 2, 3, 4])
    assert first == page_digest(b"", (1, 2, 3, 4))
    assert page_digest(first, [5, 6]) == page_digest(first, [5, 6])
    others = [
        page_digest(b"", [5, 6]),
        page_digest(page_digest(b"", [1, 2, 3, 5]), [5, 6]),
        page_digest(page_digest(b"", [1, 2]), [3, 4]),
        page_digest(first, [6, 5]),
        page_digest(first, [5, 6]),
        first,
    ]
    assert len(set(others)) == len(others)
    assert page_digest(b"", [2**40, 0]) != page_digest(b"", [0, 2**40])


def leak(pool: PagePool) -> list[list[int]]:
    pool.allocate(1)
    return []


def hold_the_padding_page(pool: PagePool) -> list[list[int]]:
    return [[PADDING_PAGE]]


def hold_a_page_twice(pool: PagePool) -> list[list[int]]:
    (page,) = pool.allocate(1) or [0]
    pool.hold([page])
    return [[page, page]]


def share_without_holding(pool: PagePool) -> list[list[int]]:
    pages = pool.allocate(1) or []
    return [pages, pages]


def free_a_held_page(pool: PagePool) -> list[list[int]]:
    pages = pool.allocate(1) or []
    pool._free[pages[0]] = None
    return [pages]


def lose_a_free_page(pool: PagePool) -> list[list[int]]:
    pool._free.popitem()
    return []


def mix_up_digests(pool: PagePool) -> list[list[int]]:
    filled(pool, b"a", b"b")
    pool._by_digest[b"a"] = pool._by_digest[b"b"]
    return []


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (leak, "holders do not match"),
        (hold_the_padding_page, "padding page"),
        (hold_a_page_twice, "holds a page twice"),
        (share_without_holding, "holders do not match"),
        (free_a_held_page, "free list is wrong"),
        (lose_a_free_page, "free list is wrong"),
        (mix_up_digests, "digests do not match"),
    ],
)
def test_wrong_use_is_noticed(misuse: Callable[[PagePool], list[list[int]]], words: str) -> None:
    pool = pool_of(3)
    pool.check_integrity([])
    owned = misuse(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check_integrity(owned)


def test_a_page_is_not_released_twice() -> None:
    pool = pool_of(3)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match=f"page {pages[0]} was released more often than held"):
        pool.release(pages)


def test_a_pool_needs_a_page_beside_the_padding() -> None:
    with pytest.raises(AssertionError, match="padding page and another"):
        PagePool(1, 16)
