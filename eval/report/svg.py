"""A matplotlib figure as SVG that stands in an HTML page, and as PNG.

The SVG keeps its text as text in the page's own font, its colours as CSS variables, and `<title>` elements on marked
parts, which browsers show as tooltips. Ids get the chart's name in front, because several drawings share one page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from quantkit.eval.report.markup import readable
from quantkit.eval.report.palette import GRID, INK, MUTED, PAPER, VARIABLES

_PNG_DOTS = 160
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "quantkit",
    "text.parse_math": False,  # a `$` in a name is a dollar
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than what browsers use: what fits here, fits
    "font.size": 12,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "axes.titlesize": 13.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_REFERENCE = re.compile(r"#(?=[\w-])")
_SHORTHAND = re.compile(r"font: (?P<weight>bold |[67]00 )?(?P<size>[\d.]+px)[^;]*")  # matplotlib before 3.11
_MATPLOTLIB_ID = re.compile(r"[mp][0-9a-f]{10}|C\w+")


@contextmanager
def drawing() -> Iterator[None]:
    """The look of all charts. Names may have characters that the font lacks; a browser has them."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def clean(text: str, most: int = 26) -> str:
    """A name for a drawing: no characters that XML forbids, and not too long."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    one_line = " ".join(printable.split())
    return one_line if len(one_line) <= most else f"{one_line[: most - 1]}…"


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_PNG_DOTS, metadata={"Software": None})
    return file.getvalue()


def inline_svg(figure: Figure, name: str, alternative: str, titles: Mapping[str, str]) -> str:
    """`titles` gives the exact numbers for the gids of artists; `alternative` is for those who do not see the chart."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    view = root.get("viewBox", "")
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    for parent in root.iter():
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
        _rename(parent, name)
        _restyle(parent)
        _add_title(parent, name, titles)
    root.attrib.clear()
    width, height = view.split()[2:]
    root.attrib |= {"viewBox": view, "role": "img", "aria-label": readable(alternative), "class": "chart"}
    root.attrib |= {"width": width, "height": height, "style": f"--drawn: {width}px"}
    root.tail = None
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _rename(node: ElementTree.Element, name: str) -> None:
    """Keeps the ids that something refers to, and those of parts with a title; all others say nothing."""
    identity = node.attrib.pop("id", None)
    if identity is not None and (_MATPLOTLIB_ID.fullmatch(identity) or identity.startswith("tip-")):
        node.set("id", f"{name}-{identity}")
    for key in [key for key in node.attrib if key.endswith("}href")]:
        node.set("href", _REFERENCE.sub(f"#{name}-", node.attrib.pop(key)))
    if "clip-path" in node.attrib:
        node.set("clip-path", _REFERENCE.sub(f"#{name}-", node.attrib["clip-path"]))


def _restyle(node: ElementTree.Element) -> None:
    """Colours become variables; the page chooses the font."""
    style = node.get("style")
    if style is None:
        return
    kept = "; ".join(part for part in style.split("; ") if not part.startswith("font-family"))
    text = _SHORTHAND.sub(_without_family, kept)
    node.set("style", _COLOUR.sub(lambda found: _variable(found[0]), text))


def _without_family(found: re.Match[str]) -> str:
    weight = f"font-weight: {found['weight'].strip()}; " if found["weight"] else ""
    return f"{weight}font-size: {found['size']}"


def _variable(colour: str) -> str:
    name = VARIABLES.get(colour)
    return f"var({name})" if name else colour


def _add_title(node: ElementTree.Element, name: str, titles: Mapping[str, str]) -> None:
    title = titles.get(node.get("id", "").removeprefix(f"{name}-"))
    if title is not None:
        shown = ElementTree.Element("title")
        shown.text = readable(title)
        node.insert(0, shown)
