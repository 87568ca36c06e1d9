"""What compute-sanitizer reports, by kernel, and what of it counts.

Only kernels with lines of Python are ours; torch and cuBLAS bring theirs. Not counted:

    initcheck   does not see what the copy engine writes (cuBLAS's newer kernels store so): torch's own kernels that
                read such results are reported
    racecheck   an access on the line where a kernel begins: Triton writes the code there by which idle groups of warps
                wait for work, and hands it to them through shared memory (`warp_specialize`). `control.py`, which does
                nothing else, is reported there too, but not for what it hands over behind a barrier of its own
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BEGINS = re.compile(
    r"(?P<what>Invalid __\w+__ \w+|Uninitialized __\w+__ memory \w+|Race reported between \w+ access|Misaligned \w+)"
)
_KERNEL = re.compile(
    r"\bat (?P<kernel>.+?)(\+0x[0-9a-f]+)?( in (?P<file>[\w.]+\.py):(?P<line>\d+))?"
    r"( \[\d+ hazards\])?\s*$"
)
_PASSED = re.compile(r"\b(\d+) passed")


@dataclass(frozen=True)
class Finding:
    what: str
    kernel: str
    ours: bool
    at_begin: bool = False  # of the kernel, on either side of a race

    def counts(self, tool: str) -> bool:
        return self.ours and not (tool == "racecheck" and self.at_begin)


def read_findings(said: str) -> list[Finding]:
    return list(_read(said.splitlines()))


def _read(lines: list[str]) -> Iterator[Finding]:
    for place, line in enumerate(lines):
        begins = _BEGINS.search(line)
        if begins is None:
            continue
        sides = [_KERNEL.search(where) for where in (line, *lines[place + 1 : place + 2])]
        found = [side for side in sides if side is not None]
        if found:
            first = found[0]
            yield Finding(begins["what"], first["kernel"], first["file"] is not None, any(map(_at_begin, found)))
        else:
            yield Finding(begins["what"], "a kernel without a name", True)


def _at_begin(side: re.Match[str]) -> bool:
    return side["file"] is not None and int(side["line"]) == _first_line(side["file"], side["kernel"])


@cache
def _first_line(name: str, kernel: str) -> int | None:
    """Where a kernel of ours begins."""
    for folder in ("kernels", "tests/support"):
        for file in (ROOT / folder).rglob(name):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if line.startswith(f"def {kernel}("):
                    return number
    return None


def passed_tests(said: str) -> int:
    """At the end, or dots until time ran out."""
    passed = _PASSED.findall(said)
    if passed:
        return int(passed[-1])
    return sum(len(dots) for dots in re.findall(r"^[.sx]+", said, re.MULTILINE))
