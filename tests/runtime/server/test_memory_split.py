"""How several engines divide a device: the arithmetic, and the plan for real checkpoints."""

import asyncio
import random
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.server.models.memory_planning import EngineSpec, make_plan, plan_engines
from quantkit.runtime.server.models.memory_split import GPU_PROCESS, MemoryNeed, as_table, split_memory

PAGE = 16


def need(name: str, weights: int, *, most: int = 10_000, least: int = 2, part: float = 1.0, **other: Any) -> MemoryNeed:
    """An engine with pages of 100 bytes; it could use `most` of them and needs `least`."""
    fields = {"activations": 0, "graphs": 0, "page_bytes": 100, "page_size": PAGE} | other
    device = fields.pop("device", "cpu")
    plan = MemoryPlan(available=1 << 60, weights=weights, pages=most, max_context=1000, **fields)
    return MemoryNeed(name, device, plan, least, part)


def test_what_is_left_is_divided_evenly() -> None:
    first, second = split_memory([need("a", 3000), need("b", 500, activations=300, graphs=200)], 10_000)
    assert (first.cache, second.cache) == (3000, 3000)
    assert (first.kv_tokens, first.max_context) == (29 * PAGE, 29 * PAGE)
    assert (first.total, second.total) == (6000, 4000)


def test_equal_bytes_are_more_tokens_for_the_smaller_model() -> None:
    first, second = split_memory([need("a", 0), need("b", 0, page_bytes=10, draft_page_bytes=10)], 10_000)
    assert (first.cache, second.cache) == (5000, 5000)
    assert (first.kv_tokens, second.kv_tokens) == (49 * PAGE, 249 * PAGE)


def test_parts_are_obeyed_and_what_one_cannot_use_the_others_get() -> None:
    shares = split_memory([need("a", 0, part=60), need("b", 0, part=40)], 10_000)
    assert [share.cache for share in shares] == [6000, 4000]
    shares = split_memory([need("a", 0, most=10), need("b", 0), need("c", 0, part=3)], 9_000)
    assert [share.cache for share in shares] == [1000, 2000, 6000]
    assert shares[2].max_context == 59 * PAGE


def test_a_context_that_was_asked_for_comes_before_equality() -> None:
    shares = split_memory([need("a", 0, least=80), need("b", 0, least=5), need("c", 0, least=10, most=10)], 10_000)
    assert [share.cache for share in shares] == [8000, 1000, 1000]


def test_a_process_on_a_gpu_costs_memory_before_it_loads_anything() -> None:
    (share,) = split_memory([need("a", 0, device="cuda:0", most=1 << 40)], GPU_PROCESS + 5000)
    assert share.cache == 5000
    with pytest.raises(InputError, match=r"do not fit together on cuda:0"):
        split_memory([need("a", 0, device="cuda:0"), need("b", 0, device="cuda:0")], GPU_PROCESS + 5000)


def test_what_does_not_fit_is_said_with_numbers() -> None:
    with pytest.raises(InputError) as refused:
        split_memory([need("a", 3_000_000), need("b", 4_000_000, least=20)], 6_500_000)
    said = str(refused.value)
    assert "a 3.00 MB (weights 3.00 MB), b 4.00 MB (weights 4.00 MB); 7.00 MB" in said
    assert "6.50 MB may be used" in said
    assert "\n" not in said


def test_no_division_takes_more_than_there_is() -> None:
    dice = random.Random(0)
    for _ in range(300):
        needs = [
            need(
                str(number),
                dice.randrange(2000),
                least=dice.choice([2, 2, 30]),
                most=dice.choice([30, 200, 10_000]),
                part=dice.choice([0.1, 1, 50]),
                page_bytes=dice.choice([7, 100, 333]),
            )
            for number in range(dice.randint(1, 5))
        ]
        available = dice.randrange(200_000)
        least = sum(one.fixed + one.least for one in needs)
        if least > available:
            with pytest.raises(InputError):
                split_memory(needs, available)
            continue
        shares = split_memory(needs, available)
        left = available - sum(share.total for share in shares)
        assert left >= 0
        for one, share in zip(needs, shares, strict=True):
            assert one.least <= share.cache <= one.most.cache
        wanting = [one for one, share in zip(needs, shares, strict=True) if share.cache < one.most.cache]
        if wanting:
            assert left < sum(one.page_bytes for one in needs) + len(needs), "memory was left though somebody wants it"


def wanted(name: str, model: str, **options: Any) -> EngineSpec:
    return EngineSpec(name, model, {"device": "cpu"} | options)


def test_the_plan_of_real_models() -> None:
    first, second = make_plan(
        [
            wanted("a", "demo", max_context=512, speculative="draft=demo-draft"),
            wanted("b", "demo-draft", kv_tokens=100),
        ]
    )
    assert first.max_context == 512
    assert first.weights > 8 * second.weights  # its draft included
    assert second.kv_tokens == 112, "whole pages"
    assert second.max_context == 112
    assert first.available == second.available
    lines = as_table([first, second]).splitlines()
    assert lines[0].split()[:3] == ["model", "device", "weights"]
    assert [line.split()[0] for line in lines[1:3]] == ["a", "b"]
    assert lines[3].startswith("may be used: ")


BOTH = [wanted("a", "demo", kv_tokens=512), wanted("b", "demo-draft", kv_tokens=256)]


@pytest.mark.long  # the server of `test_several_models.py` obeys such a plan in every run
def test_a_process_of_its_own_makes_the_same_plan() -> None:
    here, there = make_plan(BOTH), asyncio.run(plan_engines(BOTH))
    for one, other in zip(here, there, strict=True):
        assert (one.name, one.total, one.kv_tokens) == (other.name, other.total, other.kv_tokens)


WRONG = [
    (wanted("b", "nowhere"), "model 'b': no model at 'nowhere'"),
    (wanted("b", "demo-draft", max_context=1_000_000), "model 'b': max_context is 1000000"),
]


@pytest.mark.parametrize(("other", "words"), WRONG)
def test_errors_say_which_model_it_is(other: EngineSpec, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_plan([BOTH[0], other])


@pytest.mark.long
@pytest.mark.parametrize(("other", "words"), WRONG)
def test_a_process_of_its_own_makes_the_same_errors(other: EngineSpec, words: str) -> None:
    """`test_model_list.py` has one of them in every run."""
    with pytest.raises(InputError, match=words):
        asyncio.run(plan_engines([BOTH[0], other]))


def test_ranks_are_for_a_single_model() -> None:
    with pytest.raises(InputError, match=r"model 'b': one of several models cannot be divided among ranks"):
        make_plan([wanted("a", "demo"), wanted("b", "demo", tensor_parallel=2)])
