"""How products are cut where nobody measured: what the estimate must get right whatever its constants are."""

from dataclasses import replace

import pytest

from quantkit.kernels.card import KNOWN, NO_GPU, Card
from quantkit.kernels.linear.cost import Product, cheapest, microseconds
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig

TILE = SkinnyConfig(64, 16, 4, 3)
CARDS = pytest.mark.parametrize("card", [*KNOWN.values(), NO_GPU], ids=lambda card: card.name)


def packed(outputs: int, inputs: int, tokens: int = 16) -> Product:
    return Product(outputs, inputs, tokens, bytes_a_weight=0.515)


@CARDS
def test_work_is_never_free(card: Card) -> None:
    """More outputs, inputs or tokens take at least as long; a slower memory too."""
    time = microseconds(packed(4096, 4096), TILE, card)
    assert time > 0
    for larger in (packed(8192, 4096), packed(4096, 8192), packed(4096, 4096, 64)):
        assert microseconds(larger, TILE, card) >= time
    assert microseconds(packed(4096, 4096), TILE, replace(card, bandwidth=card.bandwidth / 4)) >= time
    assert microseconds(packed(65536, 4096), TILE, card) >= microseconds(
        packed(65536, 4096), TILE, replace(card, processors=2 * card.processors)
    )


@pytest.mark.parametrize("target", KNOWN)
def test_few_tiles_are_shared_and_many_are_not(target: str) -> None:
    card = KNOWN[target]
    assert cheapest(packed(512, 16384), (TILE,), card).splits >= 4
    assert cheapest(packed(65536, 1024), (TILE,), card).splits == 1


def test_a_larger_gpu_shares_more() -> None:
    small, large = KNOWN["sm_89"], KNOWN["sm_90"]
    shapes = [packed(4096, 4096), packed(6144, 4096), packed(4096, 14336), packed(3584, 18944)]
    assert sum(cheapest(shape, (TILE,), small).splits for shape in shapes) < sum(
        cheapest(shape, (TILE,), large).splits for shape in shapes
    )


@CARDS
def test_every_program_has_work(card: Card) -> None:
    for inputs in (128, 256, 384, 1152):
        found = cheapest(packed(256, inputs), (TILE, replace(TILE, outputs=32)), card)
        assert found.splits == 1 or 2 * found.splits <= inputs // found.depth


def test_tiles_that_a_grid_cannot_hold_are_passed_by() -> None:
    narrow = replace(TILE, outputs=2)
    assert cheapest(packed(262_208, 1152, 1), (narrow, TILE), KNOWN["sm_90"]).outputs == 64


def test_the_same_question_is_answered_once() -> None:
    """It is asked for every layer of every step that is no graph."""
    question = (packed(4352, 2304), (TILE,), KNOWN["sm_90"])
    first = cheapest(*question)
    before = cheapest.cache_info().hits
    assert cheapest(*question) is first
    assert cheapest.cache_info().hits == before + 1
