"""What `mkdocs build` does beyond Markdown: reference pages from the program itself, and files that lie outside docs/.

Pages are written so that a plain Git host shows them too. There `docs/reference/command-line.md` has a sentence between
two remarks where the commands will stand, and links such as `../../eval/results/...` lead into the repository. Here
what is between such remarks is replaced, and files that are linked become part of the site. A page of the repository
that is linked is named only.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from command_pages import command_reference, recipe_table  # noqa: E402

WRITTEN = {"commands": command_reference, "recipes": recipe_table, "only here": lambda: ""}
OUTSIDE = "repository"  # where files from outside docs/ stand in the site
_REGION = re.compile(rf"<!-- (?P<name>{'|'.join(WRITTEN)}) -->.*?<!-- end -->", re.DOTALL)
_LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<target>(?:\.\./)+[\w./-]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link outside of docs/."""
    linked = {
        outside
        for file in list(files.documentation_pages())
        for link in _LINK.finditer(file.content_string)
        if (outside := outside_target(file.src_uri, link["target"])) and not outside.endswith(".md")
    }
    for name in sorted(linked):
        source = str(ROOT / name)
        files.append(File.generated(config, f"{OUTSIDE}/{name}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    markdown = _REGION.sub(lambda region: WRITTEN[region["name"]](), markdown)
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        outside = outside_target(here, link["target"])
        if outside is None:
            return link[0]
        if outside.endswith(".md"):
            return link["words"]
        there = os.path.relpath(f"{OUTSIDE}/{outside}", Path(here).parent)
        return f"[{link['words']}]({there})"

    return _LINK.sub(moved, markdown)


def outside_target(page: str, target: str) -> str | None:
    """A file of the repository that is not below docs/, by its path there; None for all others."""
    whole = Path(os.path.normpath(ROOT / "docs" / Path(page).parent / target))
    if whole.is_relative_to(ROOT / "docs") or not whole.is_file():
        return None
    return whole.relative_to(ROOT).as_posix()
