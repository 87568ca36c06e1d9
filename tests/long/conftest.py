"""Live servers for the long tests."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

Started = tuple[subprocess.Popen[str], int]  # the server's process and its port


@pytest.fixture
def start_server() -> Iterator[Callable[..., Started]]:
    """`start_server("--max-context", "128", ...)`: `quantkit serve demo` on a CPU and a port of its own choice.

    What it logs goes to the file `log`, if there is one.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, log: Path | None = None) -> Started:
        command = [sys.executable, "-m", "quantkit", "serve", "demo", "--device", "cpu", "--port", "0", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with nullcontext() if log is None else log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r":(\d+)", line.rsplit("http", 1)[-1])
        assert match, line
        return process, int(match[1])

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
