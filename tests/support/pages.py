"""The pages that people read, and the commands in them: what tests of the documentation share."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_READ = (
    *(ROOT / name for name in ("README.md", "runtime/README.md", "kernels/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in _READ}
LEFT_OUT = "..."  # a line that stands for output not shown
_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<lines>.*?)^```$", re.DOTALL | re.MULTILINE)
_REMARK = re.compile(r"\s+# .*")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
CLOSE = 0.08  # of a number: a search that rounds otherwise may choose other scales for a layer
SURE = 0.005  # of a perplexity


@dataclass(frozen=True)
class Transcript:
    """A command and what a page says it prints; `before` are commands of the same block, whose output is not shown."""

    page: str
    command: str
    shown: str
    before: tuple[str, ...] = ()

    @property
    def name(self) -> tuple[str, str]:
        return self.page, self.command

    @property
    def arguments(self) -> list[str]:
        """What stands behind `quantkit`."""
        return quantkit_arguments(self.command)


def commands() -> Iterator[tuple[str, str, str]]:
    """(page, command, output, which may be empty) of all lines that begin with `$`, without their remarks."""
    for page, block in _blocks():
        yield from ((page, *found) for found in _commands_of(block))


def bare_commands() -> Iterator[tuple[str, str]]:
    """(page, command) of lines in blocks that begin with `quantkit`; a remark stands behind `#` or two spaces."""
    for page, block in _blocks():
        for line in re.findall(r"^quantkit (?!serves ).*", block, re.MULTILINE):
            yield page, re.split(r"\s{2,}|\s+# ", line)[0]


def transcripts() -> list[Transcript]:
    """Commands with output; the others only prepare the next one of their block."""
    found = []
    for page, block in _blocks():
        before: list[str] = []
        for command, output in _commands_of(block):
            if output.strip():
                found.append(Transcript(page, command, output, tuple(before)))
            before.append(command)
    return found


def quantkit_arguments(command: str) -> list[str]:
    program, *arguments = shlex.split(command)
    assert program == "quantkit", command
    return arguments


def not_printed(shown: str, printed: str) -> str | None:
    """The first piece of `shown` that is not among the printed lines in its order; spaces at line ends do not count."""
    lines, at = _lines(printed), 0
    for piece in "\n".join(_lines(shown)).split(f"\n{LEFT_OUT}\n"):
        wanted = piece.strip("\n").split("\n")
        places = [place for place in range(at, len(lines)) if lines[place : place + len(wanted)] == wanted]
        if not places:
            return piece
        at = places[0] + len(wanted)
    return None


def assert_close(shown: str, printed: str) -> None:
    """Line by line the same words, and numbers that differ by no more than CLOSE, or SURE."""
    for expected, found in zip(shown.splitlines(), printed.splitlines(), strict=True):
        assert _NUMBER.sub("#", found).split() == _NUMBER.sub("#", expected).split()
        numbers = [[float(one.replace(",", "")) for one in _NUMBER.findall(line)] for line in (expected, found)]
        assert numbers[1] == pytest.approx(numbers[0], rel=SURE if "perplexity" in expected else CLOSE), found


def words(text: str) -> list[list[str]]:
    """Line by line, without the numbers."""
    return [_NUMBER.sub("#", line).split() for line in text.splitlines()]


def _blocks() -> Iterator[tuple[str, str]]:
    """Of a terminal: those of another language hold files. A line that goes on is one line."""
    for page, text in PAGES.items():
        for block in _BLOCK.finditer(text):
            if block["language"] in ("", "bash", "console"):
                yield page, block["lines"].replace("\\\n", " ")


def _commands_of(lines: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", lines, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield _REMARK.sub("", command), output


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]
