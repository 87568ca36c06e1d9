"""Which arguments of two runs differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_SHOWN_CHARACTERS = 60


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`recipe.format.bits was 4, now 3` for every value that is not the same."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = [*after, *(key for key in before if key not in after)]
    pairs = ((key, before.get(key, "absent"), after.get(key, "absent")) for key in keys)
    return [_change(key, was, now) for key, was, now in pairs if was != now]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and JSON text of every value inside."""
    if not value or not isinstance(value, (dict, list)):
        yield path, json.dumps(value, ensure_ascii=False)
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _change(key: str, old: str, new: str) -> str:
    if _shortened(old) != _shortened(new):
        old, new = _shortened(old), _shortened(new)
    return f"{key} was {old}, now {new}"


def _shortened(text: str) -> str:
    """Beginning and end: paths differ in one, numbers in the other."""
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]}...{text[-half:]}"
