"""Pages of the key-value cache: who holds which, what they contain, which one goes first.

A page is held by as many sequences as share it. A full page whose tokens are known carries a digest of them and of
everything before them; a later sequence that begins with the same tokens takes it as it is. A page that nobody holds
keeps its contents until it is needed: pages without a digest go first, then those that were let go longest ago.

Page 0 belongs to nobody. Padding writes there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quantkit.runtime.core.pages import PADDING_PAGE, Digest


@dataclass
class PagePool:
    """All methods are exact about ownership; `check_integrity` says whether they were used so."""

    pages: int  # page 0 included
    page_size: int
    share_prefixes: bool = True
    evictions: int = 0  # pages whose contents gave way to others
    _holders: list[int] = field(default_factory=list)  # of every page
    _digests: dict[int, Digest] = field(default_factory=dict)  # of pages whose contents are known
    _by_digest: dict[Digest, int] = field(default_factory=dict)
    _free: OrderedDict[int, None] = field(default_factory=OrderedDict)  # in the order in which they are taken

    def __post_init__(self) -> None:
        assert self.pages >= 2, "a pool needs the padding page and another one"
        self._holders = [0] * self.pages
        self._free = OrderedDict.fromkeys(range(1, self.pages))

    @property
    def free(self) -> int:
        """Pages that nobody holds, whatever they contain."""
        return len(self._free)

    @property
    def usable(self) -> int:
        return self.pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """New pages with one holder each; None, and nothing changes, where there are not enough."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for pages that somebody holds, or that still have their contents."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less. The last pages of a sequence are taken again before its first ones."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released more often than held"
            if self._holders[page] == 0:
                self._free[page] = None
                if page not in self._digests:
                    self._free.move_to_end(page, last=False)

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def publish(self, page: int, digest: Digest) -> None:
        """From now on the page may serve others whose tokens have this digest. The first of equal pages serves."""
        if self.share_prefixes and digest not in self._by_digest and page not in self._digests:
            self._digests[page] = digest
            self._by_digest[digest] = page

    def withdraw(self, pages: Iterable[int]) -> None:
        """What these pages hold is not known any more; whoever holds them keeps them."""
        for page in pages:
            digest = self._digests.pop(page, None)
            if digest is not None:
                del self._by_digest[digest]

    def find(self, digest: Digest) -> int | None:
        """The page that holds the tokens of a digest."""
        return self._by_digest.get(digest) if self.share_prefixes else None

    def reset_contents(self) -> None:
        """Forgets what pages contain; ownership stays."""
        self._digests.clear()
        self._by_digest.clear()

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Fails where pages are leaked, shared or freed wrongly; `owned` are the pages of every living sequence."""
        counted = [0] * self.pages
        for pages in owned:
            assert len(set(pages)) == len(pages), f"a sequence holds a page twice: {pages}"
            for page in pages:
                counted[page] += 1
        assert counted[PADDING_PAGE] == 0, "a sequence holds the padding page"
        assert counted == self._holders, "holders do not match the pages of living sequences"
        assert set(self._free) == {page for page in range(1, self.pages) if counted[page] == 0}, "free list is wrong"
        assert {digest: page for page, digest in self._digests.items()} == self._by_digest, "digests do not match"

    def _forget(self, page: int) -> None:
        if page in self._digests:
            self.withdraw([page])
            self.evictions += 1
