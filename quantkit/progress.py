"""How long-running functions say how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int], None]  # called after each finished item with its name and the number of items in all


def silent(item: str, total: int) -> None:
    """Nobody watches."""
