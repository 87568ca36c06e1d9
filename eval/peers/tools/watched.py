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
    host = 1024 * max(_own_peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    torch = sys.modules.get("torch")
    gpu = torch.cuda.max_memory_reserved() if torch is not None and torch.cuda.is_initialized() else 0
    return {"host": round(host / _GIB, 2), "gpu": round(gpu / _GIB, 2)}


def _own_peak() -> int:
    """In KiB. What `getrusage` says of this process counts the one that started it, from before its program began."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


if __name__ == "__main__":
    file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        Path(file).write_text(json.dumps(peaks()), encoding="utf-8")
