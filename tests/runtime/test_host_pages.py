"""Pages of those who give way: as they were when they come back, and never more memory than was asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.runtime.device import host_pages
from quantkit.runtime.device.host_pages import DEVICE_BYTES, HostPages, room_for

SHAPE = (3, 2, 20, 1, 16, 8)  # layers, keys and values, pages, heads, tokens, numbers
PAGE_BYTES = 3 * 2 * 16 * 8 * 4


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def cache(request: Any) -> Tensor:
    numbers = torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32, device=request.param)
    return numbers.view(SHAPE)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages travel at a time, and a slab holds five."""
    monkeypatch.setattr(host_pages, "_AT_ONCE", 2 * PAGE_BYTES + 1)
    monkeypatch.setattr(host_pages, "_SLAB", 16 << 10)


def test_pages_come_back_as_they_were(cache: Tensor) -> None:
    before = cache.clone()
    host = HostPages(cache, 1 << 20)
    host.take(1, [3, 17, 4, 9, 5])
    host.take(2, [6])
    host.take(3, [7, 8])
    cache.zero_()
    host.give(3, [0])  # the page of a draft that was wrong stays behind
    host.give(1, [1, 2, 3, 4, 5])
    assert torch.equal(cache[:, :, [0, 1, 2, 3, 4, 5]], before[:, :, [7, 3, 17, 4, 9, 5]])
    assert not cache[:, :, 6:].any()


def test_memory_is_used_again(cache: Tensor) -> None:
    """Whoever came back, was dropped or is not kept leaves room for the next."""
    host = HostPages(cache, 1 << 20)
    for number in range(40):
        owner = 3 * number
        for ahead in range(3):
            host.take(owner + ahead, [(number + 4 * ahead + page) % 20 for page in range(3)])
        expected = cache[:, :, [number % 20, (number + 1) % 20]].clone()
        host.give(owner, [0, 1])
        assert torch.equal(cache[:, :, :2], expected)
        host.drop(owner + 1)
        host.keep({-1})
    assert host.num_bytes == 2 * (16 << 10)


@pytest.mark.parametrize("limit", [0, 1, PAGE_BYTES, 2 * PAGE_BYTES, 10_000, 40_000, 1_000_000])
def test_never_more_than_was_asked_for(limit: int) -> None:
    cache = torch.zeros(SHAPE)
    host, room = HostPages(cache, limit), room_for(PAGE_BYTES, limit)
    assert room * PAGE_BYTES <= limit
    for owner in range(room):
        host.take(owner, [owner % 20])
    assert host.num_bytes <= limit
    assert room >= (limit - (16 << 10)) // PAGE_BYTES * 0.9 - 1, "most of it can be used"
    with pytest.raises(AssertionError, match="more pages than were asked for"):
        host.take(room, [0])


@pytest.mark.gpu
def test_a_long_sequence_needs_little_of_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB of pages; the memory is pinned, and its size a power of two, so torch takes no more than that."""
    monkeypatch.undo()
    cache = torch.randn(32, 2, 1025, 8, 16, 128, dtype=torch.float16, device="cuda")
    pages = list(range(1, 1025))
    expected = cache[3, 1, 1000].clone()
    host = HostPages(cache, 3 << 30)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    host.take(0, pages)
    cache.zero_()
    host.give(0, pages)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= DEVICE_BYTES + (1 << 20)
    assert torch.equal(cache[3, 1, 1000], expected)
    assert host.num_bytes == 2 << 30
    assert all(slab.is_pinned() for slab in host._slabs)
