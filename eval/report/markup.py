"""HTML that cannot be forgotten to be escaped: every string is, unless it is `Markup` already."""

from __future__ import annotations

from html import escape

_EMPTY = frozenset({"br", "meta", "col"})


class Markup(str):
    """HTML, made by `tag` or known to be safe."""

    __slots__ = ()


Child = Markup | str | None


def tag(name: str, *children: Child, **attributes: str | int | None) -> Markup:
    """`<name ...>children</name>`. None is left out. A trailing `_` of an attribute goes, other `_` become `-`."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.removesuffix("_").replace("_", "-")}="{escape(readable(str(value)))}"')
    opened = f"<{' '.join(words)}>"
    return Markup(opened if name in _EMPTY else f"{opened}{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    return Markup("".join(safe(child) for child in children if child is not None))


def safe(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(escape(readable(text)))


def readable(text: str) -> str:
    """Control characters and lone halves of surrogate pairs, which no HTML may hold, as the sign for unreadable."""
    return "".join(character if _allowed(character) else "\ufffd" for character in text)


def _allowed(character: str) -> bool:
    code = ord(character)
    if code < 0xA0:
        return character in "\n\t" or 0x20 <= code < 0x7F
    return not 0xD800 <= code <= 0xDFFF and code & 0xFFFE != 0xFFFE and not 0xFDD0 <= code <= 0xFDEF
