"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def cell(text: object) -> str:
    """Text that cannot break out of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text: object) -> str:
    return f"`{cell(text).replace('`', '')}`"
