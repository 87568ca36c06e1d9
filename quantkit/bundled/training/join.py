"""Puts a model folder together again from the parts that `train.py --split-output` wrote.

Run as `python -m quantkit.bundled.training.join PARTS_FOLDER NAME TARGET_FOLDER`.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path


def join(parts: Path, name: str, target: Path) -> list[str]:
    """Unpacks NAME.tar.part0, part1, ... into the target folder; returns the file names."""
    files = sorted(parts.glob(f"{name}.tar.part*"), key=lambda path: int(path.name.rsplit("part", 1)[1]))
    if not files:
        raise SystemExit(f"no {name}.tar.part* in {parts}")
    data = b"".join(path.read_bytes() for path in files)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="data")
        return archive.getnames()


if __name__ == "__main__":
    print("\n".join(join(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))))
