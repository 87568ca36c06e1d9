"""How a completion differs from the unquantized model's, word by word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

_WORD = re.compile(r"\s*\S+(?:\s+$)?|\s+$")  # with the space before it, the last one with that behind it


@dataclass(frozen=True)
class Piece:
    """Text that is the same, or new; `left_out` is what the original has in its place."""

    text: str
    changed: bool = False
    left_out: str = ""


@dataclass(frozen=True)
class Differences:
    pieces: tuple[Piece, ...]
    same_words: int  # before the first difference
    equal: bool

    @property
    def summary(self) -> str:
        if self.equal:
            return "the same text"
        if self.same_words == 0:
            return "differs from the first word"
        return f"differs after {self.same_words} word{'s' if self.same_words > 1 else ''}"


def differences(original: str, text: str) -> Differences:
    """Words are compared without the space before them, which is kept as it stands."""
    ours, theirs = _WORD.findall(original), _WORD.findall(text)
    own_words, words = [one.strip() for one in ours], [one.strip() for one in theirs]
    pieces: list[Piece] = []
    for kind, start, end, from_, to in SequenceMatcher(None, own_words, words, autojunk=False).get_opcodes():
        changed = kind != "equal"
        pieces.append(Piece("".join(theirs[from_:to]), changed, "".join(ours[start:end]).strip() if changed else ""))
    return Differences(tuple(pieces), _common(own_words, words), own_words == words)


def _common(ours: list[str], theirs: list[str]) -> int:
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count
