"""`python -m quantkit.runtime.paper.process` reads a job from stdin (`compiling_ahead.job_of`) and compiles the kernels
of that engine into Triton's cache, unless that was done before: the cache keeps a note of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from quantkit.checkpoint import Checkpoint
from quantkit.kernels.card import Card
from quantkit.kernels.compiling.keys import settle_keys
from quantkit.kernels.compiling.pool import compile_all
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.paper.launches import kernels_of
from quantkit.sources import model_folder

_NOTE = "quantkit.json"
_LEFT_FREE = 2  # cores, for the engine
_KINDNESS = 10  # the engine goes first


def main() -> None:
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(_KINDNESS)
    settle_keys()
    said = sys.stdin.read()
    if said:
        try:
            compile_job(json.loads(said))
        except Exception as error:
            sys.exit(f"quantkit: kernels are compiled when they are needed: {type(error).__name__}: {error}")


def compile_job(job: dict[str, Any]) -> int:
    """How many kernels were looked at; 0 where the cache notes that all are there."""
    from triton.runtime.cache import get_cache_manager

    notes = get_cache_manager(_key_of(job))
    if notes.get_file(_NOTE) is not None:
        return 0
    card = Card(**job["card"] | {"capability": tuple(job["card"]["capability"])})
    kernels = kernels_of(job["model"], EngineOptions(**job["options"]), card, job["available"])
    done = compile_all(kernels, max(1, len(os.sched_getaffinity(0)) - _LEFT_FREE))
    notes.put(json.dumps([one.entry for one in done]), _NOTE, binary=False)
    return len(kernels)


def _key_of(job: dict[str, Any]) -> str:
    """Of what decides about kernels; not the memory that is free, which is never twice the same."""
    from quantkit.kernels.compiling.archive import build_of_triton

    checkpoint = Checkpoint(model_folder(job["model"]))
    headers = sorted((name, repr(stored.info)) for name, stored in checkpoint.tensors.items())
    formats = sorted((name, repr(fmt)) for name, fmt in checkpoint.formats.items())
    top = Path(__file__).parents[2]
    sources = [file.read_bytes() for room in ("kernels", "runtime") for file in sorted((top / room).rglob("*.py"))]
    tables = [file.read_bytes() for file in sorted((top / "kernels" / "linear" / "tuned").glob("*.json"))]
    found = hashlib.sha256(b"\0".join([*sources, *tables]))
    rest = [job["options"], job["card"], checkpoint.config, headers, formats, build_of_triton()]
    found.update(json.dumps(rest, sort_keys=True).encode())
    return found.hexdigest()


def _end_with(parent: int) -> None:
    """This process and its own, when the engine has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
