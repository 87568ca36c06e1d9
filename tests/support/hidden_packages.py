"""Packages that are installed, but as if they were not: for what happens without them."""

import sys
from collections.abc import Iterable
from typing import Any


class _Without:
    """A finder of modules that does not find some packages."""

    def __init__(self, finder: Any, hidden: frozenset[str]) -> None:
        self._finder, self._hidden = finder, hidden

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)  # importlib.metadata asks finders, too


def hide(packages: Iterable[str]) -> None:
    """Until this process ends; call it before any of them is imported."""
    hidden = frozenset(package.partition(".")[0] for package in packages)
    assert not hidden & set(sys.modules), "some are imported already"
    sys.meta_path[:] = [_Without(finder, hidden) for finder in sys.meta_path]
