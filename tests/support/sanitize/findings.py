"""What compute-sanitizer reports, by kernel, and what of it counts.

Only kernels with lines of Python are ours; torch and cuBLAS bring theirs. Not counted:

    initcheck   does not see what the copy engine writes (cuBLAS's newer kernels store so): torch's own kernels that
                read such results are reported
    racecheck   reports kernels whose groups of warps hand work to each other by barriers in shared memory (mbarrier):
                cuBLAS's own (nvjet_...) as well as our two in Gluon. That it does not understand these barriers is a
                guess until `control.py` has been run under it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WARP_GROUPS = ("hopper_kernel", "_hopper_prefill", "control_kernel")
_BEGINS = re.compile(
    r"(?P<what>Invalid __\w+__ \w+|Uninitialized __\w+__ memory \w+|Race reported between \w+ access|Misaligned \w+)"
)
_KERNEL = re.compile(r"\bat (?P<kernel>.+?)(\+0x[0-9a-f]+)?( in (?P<file>[\w.]+\.py):\d+)?\s*$")
_PASSED = re.compile(r"\b(\d+) passed")


@dataclass(frozen=True)
class Finding:
    what: str
    kernel: str
    ours: bool

    def counts(self, tool: str) -> bool:
        return self.ours and not (tool == "racecheck" and self.kernel in WARP_GROUPS)


def read_findings(said: str) -> list[Finding]:
    return list(_read(said.splitlines()))


def _read(lines: list[str]) -> Iterator[Finding]:
    for place, line in enumerate(lines):
        begins = _BEGINS.search(line)
        if begins is None:
            continue
        for where in (line, *lines[place + 1 : place + 2]):  # in the same line, or in the next one
            kernel = _KERNEL.search(where)
            if kernel is not None:
                yield Finding(begins["what"], kernel["kernel"], kernel["file"] is not None)
                break
        else:
            yield Finding(begins["what"], "a kernel without a name", True)


def passed_tests(said: str) -> int:
    """At the end, or dots until time ran out."""
    passed = _PASSED.findall(said)
    if passed:
        return int(passed[-1])
    return sum(len(dots) for dots in re.findall(r"^[.sx]+", said, re.MULTILINE))
