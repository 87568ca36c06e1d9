"""Runs a module, and leaves in a file the most memory that it held: `... watched FILE MODULE ARGUMENTS`.

In GiB: `host` of the process or its largest child, `gpu` as torch reserved it.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
from pathlib import Path

_GIB = 2**30


def peaks() -> dict[str, float]:
    host = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    torch = sys.modules.get("torch")
    gpu = torch.cuda.max_memory_reserved() if torch is not None and torch.cuda.is_initialized() else 0
    return {"host": round(host / _GIB, 2), "gpu": round(gpu / _GIB, 2)}


if __name__ == "__main__":
    file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        Path(file).write_text(json.dumps(peaks()), encoding="utf-8")
