"""A drawn chart, ready for the page and for a file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    name: str  # of its PNG file, without the ending
    title: str
    caption: str  # how to read it
    panels: tuple[str, ...]  # SVG to stand in HTML, each readable at the width of a phone
    png: bytes  # all panels in one picture
    wide: bool = False  # too wide for a phone: its container scrolls

    @property
    def file(self) -> str:
        return f"{self.name}.png"
