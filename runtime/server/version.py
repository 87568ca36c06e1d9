"""Which quantkit this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    try:
        return version("quantkit")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"
