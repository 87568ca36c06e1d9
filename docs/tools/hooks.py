"""What `mkdocs build` does beyond Markdown: reference pages from the program itself, and files that lie outside docs/.

Pages are written so that a plain Git host shows them too. There `docs/reference/command-line.md` is a page with a
remark where the commands will stand, and links such as `../../eval/results/...` lead into the repository; here the
remark is replaced, and files that are linked become part of the site.
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

GENERATED = {"<!-- commands -->": command_reference, "<!-- recipes -->": recipe_table}
OUTSIDE = "repository"  # where files from outside docs/ stand in the site
_LINK = re.compile(r"(?P<before>\]\()(?P<target>(?:\.\./)+[\w./-]+)(?P<after>[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link outside of docs/."""
    linked = {
        outside
        for file in list(files.documentation_pages())
        for link in _LINK.finditer(file.content_string)
        if (outside := outside_target(file.src_uri, link["target"])) is not None
    }
    for name in sorted(linked):
        source = str(ROOT / name)
        files.append(File.generated(config, f"{OUTSIDE}/{name}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    for remark, write in GENERATED.items():
        if remark in markdown:
            markdown = markdown.replace(remark, write())
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        outside = outside_target(here, link["target"])
        if outside is None:
            return link[0]
        there = os.path.relpath(f"{OUTSIDE}/{outside}", Path(here).parent)
        return f"{link['before']}{there}{link['after']}"

    return _LINK.sub(moved, markdown)


def outside_target(page: str, target: str) -> str | None:
    """A file of the repository that is not below docs/, by its path there; None for all others."""
    whole = Path(os.path.normpath(ROOT / "docs" / Path(page).parent / target))
    if whole.is_relative_to(ROOT / "docs") or not whole.is_file() or whole.suffix == ".md":
        return None
    return whole.relative_to(ROOT).as_posix()
