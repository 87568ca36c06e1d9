"""`make dist`: builds sdist and wheel, holds them against the repository, and tries the wheel where no checkout is.

Both are built from a copy of the tracked files, so that nothing else gets in, and the wheel from the sdist.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
LINKED = ("eval", "kernels", "runtime", "recipes")  # folders that the package has by symbolic links
_BUILD_SDIST = """
import sys
from setuptools import build_meta
build_meta.build_sdist(sys.argv[1], {"--global-option": ["--quiet"]})
"""


def tracked_files(root: Path) -> list[PurePosixPath]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return [PurePosixPath(name) for name in names if name and os.path.lexists(root / name)]


def packaged(files: Iterable[PurePosixPath]) -> set[str]:
    """What a wheel must hold of the repository: all of the package but training scripts, results and pages."""
    inside = (PurePosixPath("quantkit", file) if file.parts[0] in LINKED else file for file in files)
    return {
        str(file)
        for file in inside
        if file.parts[0] == "quantkit"
        and str(file) not in {f"quantkit/{folder}" for folder in LINKED}
        and not file.is_relative_to("quantkit/bundled/training")
        and not file.is_relative_to("quantkit/runtime/server/compose")  # which builds an image of the repository
        and (
            not file.is_relative_to("quantkit/eval/results")
            or file.name in ("interop.csv", "gguf.csv", "engine.csv", "recipe_quality.csv")
        )
        and str(file) not in ("quantkit/kernels/README.md", "quantkit/runtime/README.md")
    }


def check_contents(expected: set[str], sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == expected, f"wheel: missing {expected - in_wheel}, not expected {in_wheel - expected}"
    assert expected <= in_sdist, f"sdist: missing {expected - in_sdist}"


def build(root: Path, output: Path) -> tuple[Path, Path]:
    """Sdist and wheel of the tracked files of a repository."""
    files = tracked_files(root)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            copy = Path(folder, file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, copy, follow_symlinks=False)
        _call(sys.executable, "-c", _BUILD_SDIST, output, cwd=Path(folder))
    (sdist,) = output.glob("*.tar.gz")
    _call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", output, sdist)
    (wheel,) = output.glob("*.whl")
    check_contents(packaged(files), sdist, wheel)
    return sdist, wheel


def check_tag(root: Path, wheel: Path) -> None:
    """A commit with a tag such as v0.2.0 is that release."""
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    version = wheel.name.split("-")[1]
    releases = [tag for tag in tags.stdout.split() if tag.startswith("v")]
    assert releases in ([], [f"v{version}"]), f"the commit is tagged {releases}, but pyproject.toml says {version}"


def try_wheel(wheel: Path, lock: Path) -> None:
    """Installs it in a new environment and runs what a newcomer runs, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment, empty = Path(folder, "environment"), Path(folder, "empty")
        empty.mkdir()
        _call(sys.executable, "-m", "venv", environment)
        pip = [environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", lock]
        with _timed("pip install 'quantkit[report]'"):
            _call(*pip, f"{wheel}[report]", cwd=empty)
        print(f"{_megabytes(environment):>8,} MB    the environment")
        quantkit = environment / "bin" / "quantkit"
        with _timed("quantkit demo --quick"):
            _call(quantkit, "demo", "--quick", cwd=empty)
        print(f"{_megabytes(empty):>8,} MB    what the demo wrote")
        refused = subprocess.run(
            [quantkit, "serve", "demo"], cwd=empty, env=_environment(), capture_output=True, text=True, check=False
        )
        assert refused.stderr.endswith("pip install 'quantkit[serve]'\n"), refused.stderr
        assert refused.returncode == 2


def _call(*command: object, cwd: Path | None = None) -> None:
    subprocess.run([str(word) for word in command], cwd=cwd, env=_environment(), check=True)


def _environment() -> dict[str, str]:
    """Without what would let Python find this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _megabytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()) // 1_000_000


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    print(f"{time.monotonic() - begin:>8.0f} s     {what}")


if __name__ == "__main__":
    built = build(ROOT, ROOT / "dist")
    check_tag(ROOT, built[1])
    for file in built:
        print(f"{file.stat().st_size / 1e6:>8.1f} MB    dist/{file.name}")
    sys.stdout.flush()
    try_wheel(built[1], ROOT / "requirements-lock.txt")
