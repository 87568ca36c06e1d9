"""How sizes, counts, durations and models are called where people read them."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_CACHE = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")  # huggingface_hub's folder of one model
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def human_bytes(count: float) -> str:
    """1234567 -> '1.23 MB' (decimal units, as disks and model cards count)."""
    return _scaled(count, ("B", "kB", "MB", "GB"), digits=2)


def human_count(count: float) -> str:
    """1234567 -> '1.2 M'."""
    return _scaled(count, ("", "k", "M", "B"), digits=1)


def _scaled(count: float, units: tuple[str, ...], digits: int) -> str:
    """In the largest unit that leaves a number of at least 1; whole numbers have no digits behind the point."""
    power = 0
    while abs(count) >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{digits if power else 0}f} {units[power]}".rstrip()


def human_duration(seconds: float) -> str:
    """A duration as roughly as an estimate deserves: two digits at most."""
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.2g} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.2g} minutes"
    hours = seconds / 3600
    return f"{hours:.2g} hours" if hours < 100 else f"{hours:,.0f} hours"


def model_name(model: str | Path) -> str:
    """What to call a model in public: its hub name, or the name of its folder; never a path of this machine."""
    cached = [match for part in Path(model).parts if (match := _HUB_CACHE.fullmatch(part))]
    if cached:
        return f"{cached[-1]['owner']}/{cached[-1]['name']}"
    if isinstance(model, str) and _HUB_NAME.fullmatch(model) and not model.startswith(".") and not Path(model).exists():
        return model
    return Path(model).resolve().name
