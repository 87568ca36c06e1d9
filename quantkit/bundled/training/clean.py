"""Decides which blocks are English prose worth keeping, and removes repeated paragraphs and thin documents."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the parser of HTML that extract.py needs is not installed everywhere
    from .extract import Block

STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        "the of and to a in is for that this it with as be on are by an or from can if not you will when which at "
        "has have was may must should all any each used use its but also more than into their they "
        "we he his her i so one no only other",
    )
)
BOILERPLATE = re.compile(
    r"copyright|all rights reserved|licensed under|powered by|created using sphinx|last updated|click here"
    r"|javascript|see licen[cs]e"
    r"|generated (by|on|from)|warrant(y|ies)|table of contents|navigation|previous:|next:"
    r"|source code:|\bunsubscribe\b|lorem ipsum"
    r"|^bases:|^alias (for|of)|^inherit|overrides? the|definition at line"
    r"|reimplemented from|referenced by|this page was|built with"
    r"|^(todo|fixme)|redistribut|all other trademarks|^see also:?$|^return type|report (a )?bug",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z']+")
PLAIN = str.maketrans(
    {
        "\u2019": "'",
        "\u2018": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\xa0": " ",
        "\u2014": "-",
        "\u2013": "-",
        "\u2026": "...",
    }
)
MIN_DOCUMENT = 400
MAX_CODE_SHARE = 0.2


def is_prose(text: str, minimum: int = 40) -> bool:
    """Whether one paragraph reads as English sentences."""
    if len(text) < minimum or len(text) > 6000 or "\ufffd" in text or BOILERPLATE.search(text[:200]):
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    if letters < 0.82 * len(text) or sum(character > "\u024f" for character in text) > 0.02 * len(text) + 1:
        return False
    words = WORD.findall(text)
    if len(words) < 6 or len(text) > 12 * len(words):
        return False
    common = sum(word.lower() in STOPWORDS for word in words)
    return common >= 0.16 * len(words)


def is_heading(text: str) -> bool:
    """Whether a heading is short, readable and says something."""
    return (
        3 <= len(text) <= 90
        and text.isascii()
        and bool(re.search(r"[A-Za-z]{3}", text))
        and not BOILERPLATE.search(text)
    )


def is_code(text: str) -> bool:
    """Whether a code example is short enough and not data."""
    lines = text.split("\n")
    if not 15 <= len(text) <= 1500 or not text.isascii() or max(map(len, lines)) > 120:
        return False
    return sum(character.isalpha() or character == " " for character in text) > 0.6 * len(text)


def clean(blocks: list[Block]) -> list[Block]:
    """The blocks worth keeping, in order; code is kept up to a share of the document and only next to prose."""
    kept: list[Block] = []
    prose = code = 0
    for kind, text in blocks:
        text = text.translate(PLAIN)
        if kind == "h":
            text = re.sub(r"^(\d+\.)+\d*\s+|^(Chapter|Appendix) \w+\.\s+", "", text)
        if kind in {"p", "li"} and is_prose(text, 40 if kind == "p" else 25):
            kept.append((kind, text))
            prose += len(text)
        elif kind in {"h", "sig"} and is_heading(text):
            kept.append((kind, text))
        elif kind == "pre" and is_code(text) and kept and code + len(text) < MAX_CODE_SHARE * prose + 200:
            kept.append((kind, text.rstrip()))
            code += len(text)
    return kept


def key(text: str) -> int:
    """Hash of a paragraph that ignores case, digits and punctuation."""
    letters = re.sub(r"[^a-z]+", "", text.lower())
    return int.from_bytes(hashlib.blake2b(letters.encode(), digest_size=8).digest(), "little")


def keys_of(text: str) -> set[int]:
    """The keys of all paragraphs, list items and code examples of a text that `render` made."""
    blocks = text.split("\n\n")
    return {key(part) for block in blocks for part in (block, *(block.split("\n") if block.startswith("- ") else ()))}


def deduplicate(blocks: list[Block], seen: set[int]) -> list[Block]:
    """Blocks of one document without paragraphs seen before; nothing when the document was mostly seen before."""
    fresh: list[Block] = []
    before = after = 0
    for kind, text in blocks:
        if kind in {"p", "li", "pre"}:
            digest = key(text)
            before += len(text)
            if digest in seen:
                continue
            seen.add(digest)
            after += len(text)
        fresh.append((kind, text))
    if after < MIN_DOCUMENT or after < 0.3 * before:
        return []
    return without_empty_headings(fresh)


def without_empty_headings(blocks: list[Block]) -> list[Block]:
    """Drops headings and names that have no text under them."""
    kept: list[Block] = []
    for kind, text in reversed(blocks):
        if kind in {"h", "sig"} and (not kept or kept[-1][0] == "sig" or (kept[-1][0] == "h" and kind == "sig")):
            continue
        kept.append((kind, text))
    return kept[::-1]


def render(blocks: list[Block]) -> str:
    """Text of a document: paragraphs separated by blank lines, list items and code on lines of their own."""
    parts: list[str] = []
    for kind, text in blocks:
        if kind == "li":
            text = "- " + text
        elif kind == "pre":
            text = "\n".join("    " + line if line.strip() else "" for line in text.split("\n"))
        parts.append(("\n" if kind == "li" and parts and parts[-1].lstrip("\n").startswith("- ") else "\n\n") + text)
    return "".join(parts).strip() + "\n"
