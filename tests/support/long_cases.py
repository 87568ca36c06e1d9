"""Cases of a parametrized test of which a few run in every `make test`, and all with the long tests."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def others_long(cases: Iterable[Any] | Mapping[str, Any], kept: Collection[Any]) -> list[Any]:
    """All of them; those that are not kept are marked `long`. A mapping has names, which become the tests' own."""
    if isinstance(cases, Mapping):
        named = [(name, value if isinstance(value, tuple) else (value,)) for name, value in cases.items()]
        return [
            pytest.param(*values, id=name, marks=() if name in kept else pytest.mark.long) for name, values in named
        ]
    return [case if case in kept else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)


def one_of_each(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All of them; of those that begin alike one is kept, of the next the next, so that all that follows is met."""
    own: dict[Any, list[tuple[Any, ...]]] = {}
    for case in cases:
        own.setdefault(case[0], []).append(case)
    kept = [some[number % len(some)] for number, some in enumerate(own.values())]
    return others_long([case for some in own.values() for case in some], kept)
