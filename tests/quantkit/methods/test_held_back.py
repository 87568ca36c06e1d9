"""Which sequences judge, and that none of them is learned from."""

from itertools import islice

import pytest

from quantkit.methods.held_back import fitted, judged, learning_order


@pytest.mark.parametrize(("count", "held"), [(8, 1), (16, 2), (128, 16), (256, 32), (1000, 32)])
def test_the_last_eighth_judges(count: int, held: int) -> None:
    assert list(judged(count)) == list(range(count - held, count))
    assert fitted(count) == count - held
    assert set(islice(learning_order(count, 0), 2 * count)) == set(range(count - held))


def test_few_sequences_do_both() -> None:
    assert list(judged(7)) == [0, 1, 2, 3, 4, 5, 6]
    assert fitted(7) == 7
    assert set(islice(learning_order(7, 0), 7)) == set(range(7))
