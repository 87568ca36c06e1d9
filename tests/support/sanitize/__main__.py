"""`python -m sanitize`: runs the kernel tests on a GPU under compute-sanitizer, each file in a process of its own.

    memcheck    reads and writes outside of what was allocated; torch's own pool, which would hide them, is off
    initcheck   reads of memory that nobody has written
    racecheck   accesses to shared memory that nothing keeps apart

Prints a line for every file, and what was found in which kernel; exit code 1 where that is one of ours. Tests that
capture graphs are left out: a capture may not allocate. `findings.py` says what is not held against a kernel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sanitize.findings import Finding, passed_tests, read_findings

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TOOLS = ("memcheck", "initcheck", "racecheck")
WITHOUT = "not graph and not tun and not the_large_layer_runs"


def run_file(tool: str, file: str, seconds: int) -> tuple[str, str]:
    """Everything that was said, and how it ended."""
    paths = os.pathsep.join([str(ROOT), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu or kernel", "-k", WITHOUT, file]
    command = ["timeout", "-s", "INT", str(seconds), "compute-sanitizer", "--tool", tool, "--print-limit", "1000"]
    done = subprocess.run(
        [*command, "--target-processes", "all", *tests],
        text=True,
        errors="replace",
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout, "out of time" if done.returncode == 124 else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sanitize")
    parser.add_argument("--tool", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=int, default=600, help="for each file; what did not run by then is counted")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) * 2 // 3))
    parser.add_argument("--logs", type=Path, help="a folder for everything that the tool said")
    parser.add_argument("files", nargs="*")
    given = parser.parse_args()
    files = given.files or sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests" / "kernels").glob("test_*.py")
        if "mark.gpu" in (text := file.read_text(encoding="utf-8")) or "mark.kernel" in text
    )
    ours: list[Finding] = []
    for tool in given.tool.split(","):
        with ThreadPoolExecutor(given.processes) as pool:
            runs = pool.map(partial(run_file, tool, seconds=given.seconds), files)
            for file, (said, end) in zip(files, runs, strict=True):
                if given.logs:
                    given.logs.mkdir(parents=True, exist_ok=True)
                    (given.logs / f"{tool}-{Path(file).stem}.log").write_text(said, encoding="utf-8")
                found = read_findings(said)
                ours += [finding for finding in found if finding.counts(tool)]
                print(f"{tool} {Path(file).name}: {passed_tests(said)} tests, {end}{_kernels(found, tool)}", flush=True)
    print(f"{len(ours)} findings in kernels of quantkit")
    sys.exit(1 if ours else 0)


def _kernels(found: list[Finding], tool: str) -> str:
    counted = Counter((finding.kernel, finding.counts(tool)) for finding in found)
    said = [f"{number} in {name}{'' if counts else ' (not counted)'}" for (name, counts), number in counted.items()]
    return "".join(f"\n    {line}" for line in said)


if __name__ == "__main__":
    main()
