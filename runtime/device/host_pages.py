"""Pages in host memory, of sequences that had to give way: never more bytes than were asked for.

Beside a GPU the memory is pinned. torch makes a piece of pinned memory as large as the next power of two and never
gives it back, so it is taken in slabs of such a size, when they are needed. Pages travel a few at a time: when
sequences give way the device is full, and what travels needs room there, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor

_SLAB = 256 << 20
_AT_ONCE = 32 << 20
DEVICE_BYTES = 2 * _AT_ONCE  # that travelling pages take on the device


def room_for(page_bytes: int, limit: int) -> int:
    """How many pages fit in so many bytes."""
    slab = _slab_bytes(page_bytes, limit)
    return limit // slab * (slab // page_bytes) if slab else 0


def _slab_bytes(page_bytes: int, limit: int) -> int:
    """The largest power of two that is neither more than the limit nor than a slab should be."""
    most = min(limit, max(_SLAB, 2 * page_bytes))
    return 1 << (most.bit_length() - 1) if most > 0 else 0


class HostPages:
    def __init__(self, cache: Tensor, limit: int) -> None:
        """For pages of a cache [layers, 2, pages, ...], as far as they fit in so many bytes."""
        self._cache = cache
        layers, both, _, *rest = cache.shape
        self._shape = (layers, both, *rest)
        self._page_bytes = torch.Size(self._shape).numel() * cache.element_size()
        self._slab_bytes = _slab_bytes(self._page_bytes, limit)
        self._in_slab = self._slab_bytes // self._page_bytes
        self._room = room_for(self._page_bytes, limit)
        self._slabs: list[Tensor] = []  # [pages, layers, 2, ...]
        self._free: list[int] = []
        self._held: dict[int, list[int]] = {}  # owner -> its pages here

    @property
    def num_bytes(self) -> int:
        return len(self._slabs) * self._slab_bytes

    def take(self, owner: int, pages: list[int]) -> None:
        """Copies pages of the cache here. Nothing waits, but whoever writes to them on the device comes after."""
        assert owner not in self._held, "its pages are here already"
        while len(self._free) < len(pages):
            self._add_slab()
        self._held[owner] = own = [self._free.pop() for _ in pages]
        travelling = self._travelling(len(pages))
        for at in self._parts(len(pages)):
            travelling[: len(pages[at])] = self._cache[:, :, self._on_device(pages[at])].movedim(2, 0)
            for number, page in zip(own[at], travelling, strict=False):
                self._page(number).copy_(page, non_blocking=True)

    def give(self, owner: int, pages: list[int]) -> None:
        """Copies the first pages of this owner back into these of the cache, and forgets the rest."""
        own = self._held[owner][: len(pages)]
        travelling = self._travelling(len(pages))
        for at in self._parts(len(pages)):
            for number, page in zip(own[at], travelling, strict=False):
                page.copy_(self._page(number), non_blocking=True)
            self._cache[:, :, self._on_device(pages[at])] = travelling[: len(pages[at])].movedim(0, 2)
        self.drop(owner)

    def drop(self, owner: int) -> None:
        """Its pages are not wanted any more, if there are any."""
        self._free += self._held.pop(owner, ())

    def keep(self, owners: Container[int]) -> None:
        """Of these only."""
        for owner in [one for one in self._held if one not in owners]:
            self.drop(owner)

    def _add_slab(self) -> None:
        first = len(self._slabs) * self._in_slab
        assert first < self._room, "more pages than were asked for"
        raw = torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._cache.device.type == "cuda")
        pages = raw[: self._in_slab * self._page_bytes].view(self._cache.dtype)
        self._slabs.append(pages.view(self._in_slab, *self._shape))
        self._free += reversed(range(first, first + self._in_slab))

    def _page(self, number: int) -> Tensor:
        return self._slabs[number // self._in_slab][number % self._in_slab]

    @property
    def _at_once(self) -> int:
        return max(1, _AT_ONCE // self._page_bytes)

    def _parts(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self._at_once) for start in range(0, count, self._at_once))

    def _travelling(self, count: int) -> Tensor:
        """Room on the device for pages of one part; the next part comes when they are gone."""
        return self._cache.new_empty(min(count, self._at_once), *self._shape)

    def _on_device(self, pages: list[int]) -> Tensor:
        return torch.tensor(pages, device=self._cache.device)
