"""The blocks of code on Start and Guides, in order, with the remarks that say what a block is.

<!-- file: NAME -->       the block is a file of that name
<!-- server -->           the block starts a server, which runs until the page ends
<!-- not run: REASON -->  nobody runs it here; tests/quantkit/test_docs_guides.py has the list of all such blocks
"""

import re
from dataclasses import dataclass

from pages import PAGES

FOLDERS = ("docs/start/", "docs/guides/")
NAMES = [page for page in PAGES if page.startswith(FOLDERS)]
RUN = ("bash", "console", "python")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<remark>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    remark: str = ""

    @property
    def file(self) -> str | None:
        return self.remark.removeprefix("file: ") if self.remark.startswith("file: ") else None

    @property
    def server(self) -> bool:
        return self.remark == "server"

    @property
    def not_run(self) -> str | None:
        return self.remark.removeprefix("not run: ") if self.remark.startswith("not run: ") else None


def blocks(page: str) -> list[Block]:
    found = _BLOCK.finditer(PAGES[page])
    return [Block(page, each["language"], each["text"], each["remark"] or "") for each in found]


def scripts(text: str) -> list[str]:
    """Commands of quantkit one by one; other lines of the shell that stand together, together."""
    found: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        alone = line.startswith("quantkit ") or not found or found[-1].startswith("quantkit ")
        found[len(found) - (not alone) :] = [line] if alone else [f"{found[-1]}\n{line}"]
    return found
