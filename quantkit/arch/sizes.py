"""Sizes from config.json, refused in one line where no model has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import InputError

Config = Mapping[str, Any]  # the contents of config.json
MOST_LAYERS = 10_000  # a file that says more would make lists that no memory holds


def size(config: Config, key: str, most: int | None = None, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: '{key}' is {value!r}, but must be a positive whole number")
    if most is not None and value > most:
        raise InputError(f"config.json: '{key}' is {value}, but no model has more than {most:,}")
    return value
