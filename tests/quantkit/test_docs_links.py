"""Links between pages lead to files and headings that are there, and the site has every page.

`make docs` checks the same for what it builds; here README, sources and tests are read too, and nothing is installed.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from pages import PAGES, ROOT
from quantkit.formats.engine_rules import PROJECTS

LINKED = {**PAGES, "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NAMED = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|py)")
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`[^`\n]+`")
ROOMS = ("quantkit", "runtime", "eval", "kernels", "recipes", "tests")
SOURCES = [file for room in ROOMS for file in (ROOT / room).rglob("*")
           if file.suffix in (".py", ".yaml") or file.name == "README.md"]  # fmt: skip


def links(page: str) -> Iterator[tuple[str, str]]:
    """(path, anchor) of links that lead nowhere else; code holds none."""
    for found in _LINK.finditer(_SPAN.sub("`code`", _CODE.sub("", LINKED[page]))):
        if "://" not in found["target"]:
            path, _, anchor = found["target"].partition("#")
            yield path, anchor


def anchors(page: str) -> set[str]:
    """Of a page's headings, as Python-Markdown makes them."""
    titles = re.findall(r"^#+ (.+)$", _CODE.sub("", LINKED[page]), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    for path, anchor in links(page):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {path}"
        name = target.resolve().relative_to(ROOT).as_posix()
        assert not anchor or anchor in anchors(name), f"{page}: {path}#{anchor}"


def test_pages_that_code_and_texts_name_are_there() -> None:
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in SOURCES}
    texts |= LINKED | {"Makefile": (ROOT / "Makefile").read_text(encoding="utf-8")}
    named = {(name, page) for name, text in texts.items() for page in _NAMED.findall(text)}
    assert len(named) > 60
    theirs = {path for project in PROJECTS.values() for path in project.read}  # pages of other engines
    missing = [(name, page) for name, page in sorted(named) if not (ROOT / page).exists()]
    assert [(name, page) for name, page in missing if not any(path.startswith(page) for path in theirs)] == []


def pages_in(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield f"docs/{entry}"
        else:
            yield from pages_in(entry)


def test_the_site_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(pages_in(config["nav"]))
    assert sorted(listed) == sorted(page for page in PAGES if page.startswith("docs/"))
    assert config["strict"] is True
    assert set(config["validation"].values()) == {"warn"}


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 130


def test_wrong_links_would_be_seen() -> None:
    assert ("../performance/index.md", "the-engine") in set(links("docs/guides/choose-a-format.md"))
    assert "the-engine" in anchors("docs/performance/index.md")
    assert "4-bit-floats" in anchors("docs/explanations/quantization.md")
    assert sum(1 for page in LINKED for _ in links(page)) > 150
