"""Downloads the archives named in sources.toml from the registries that apt-get, pip and npm are set up to use.

Run as `python -m quantkit.bundled.training.fetch --work FOLDER`. Debian packages come in the version the archive has
now, with their licence checked again; the others in the recorded version.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import collect, licences

HERE = Path(__file__).parent
Row = dict[str, str]
# The automatic check cannot decide these (free-form file, vendored code, own licence): the table's licence is taken.
NOT_AUTOMATIC = frozenset({"python3.11-doc", "rust-doc", "wordnet-base"})


def debian_archive(row: Row, folder: Path) -> Path | None:
    """Downloads one Debian package; None when its copyright file does not confirm the licence."""
    names = f"{row['package']}_*.deb"
    if not list(folder.glob(names)):
        subprocess.run(["apt-get", "download", row["package"]], cwd=folder, check=False, capture_output=True)
    found = sorted(folder.glob(names))
    if not found:
        return None
    if row["package"] in NOT_AUTOMATIC:
        return found[-1]
    for name, data in collect.debian_members(found[-1]):
        if name.endswith("/copyright"):
            return found[-1] if licences.debian(data.decode("utf-8", "replace")) else None
    return None


def pypi_archive(row: Row, folder: Path) -> Path | None:
    """Downloads the recorded file with pip; its licence is the one read when the table was made."""
    kind = "--only-binary" if row["archive"].endswith(".whl") else "--no-binary"
    wanted = [f"{row['package']}=={row['version']}", kind, row["package"], "--no-deps"]
    target = folder / row["archive"]
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *wanted]
        subprocess.run(command, check=False, capture_output=True)
    return target if target.exists() else None


def npm_archive(row: Row, folder: Path) -> Path | None:
    """Downloads one npm package of the recorded version."""
    subprocess.run(["npm", "pack", f"{row['package']}@{row['version']}"], cwd=folder, check=False, capture_output=True)
    target = folder / row["archive"]
    return target if target.exists() else None


FETCHERS = {"debian": debian_archive, "pypi": pypi_archive, "npm": npm_archive}


def fetch(row: Row, work: Path) -> str | None:
    """Downloads one source under the name the table gives it; returns what went wrong, or None."""
    folder = work / "archives" / row["kind"]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = FETCHERS[row["kind"]](row, folder)
    except (OSError, ValueError) as error:
        return f"{row['package']}: {error}"
    if found is None:
        return f"{row['package']}: not available or licence not confirmed"
    if found.name != row["archive"]:
        found.rename(folder / row["archive"])
    return None


def main() -> None:
    """Downloads all sources, several at a time, and lists what could not be taken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    rows: list[Row] = tomllib.loads((HERE / "sources.toml").read_text(encoding="utf-8"))["source"]
    with ThreadPoolExecutor(8) as pool:
        problems = [problem for problem in pool.map(lambda row: fetch(row, args.work), rows) if problem]
    print("\n".join(problems))
    print(f"{len(rows) - len(problems)} of {len(rows)} sources downloaded")


if __name__ == "__main__":
    main()
