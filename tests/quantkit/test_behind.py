"""Work behind the caller's: in order, one at a time, and no error is lost."""

import threading

import pytest

from quantkit.pipeline.behind import Behind


def test_everything_is_done_in_order_when_left() -> None:
    done: list[int] = []
    with Behind() as behind:
        for number in range(20):
            behind.do(done.append, number)
    assert done == list(range(20))


def test_the_caller_goes_on_meanwhile() -> None:
    allowed, seen = threading.Event(), []
    with Behind() as behind:
        behind.do(lambda: seen.append(allowed.wait(10)))
        assert not seen
        allowed.set()
    assert seen == [True]


def test_an_error_stops_the_next_one() -> None:
    done: list[int] = []
    with Behind() as behind:
        behind.do(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            behind.do(done.append, 1)
    assert not done


def test_an_error_of_the_last_one_is_raised_when_left() -> None:
    with pytest.raises(ZeroDivisionError), Behind() as behind:
        behind.do(lambda: 1 / 0)


def test_the_callers_own_error_waits_for_what_runs_and_is_the_one_raised() -> None:
    allowed, done = threading.Event(), []

    def write() -> None:
        allowed.wait(10)
        done.append(1)

    def fail() -> None:
        with Behind() as behind:
            behind.do(write)
            allowed.set()
            raise KeyError("caller")

    with pytest.raises(KeyError):
        fail()
    assert done == [1]
