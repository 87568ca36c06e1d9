"""A virtual environment for every tool, since they ask for different versions of the same packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from quantkit.eval.peers.jobs import TOOLS

ROOT = Path(__file__).resolve().parents[2]
_LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source package carries all of llama.cpp
_PROGRAMS = ("llama-quantize", "llama-imatrix", "llama-bench")


@dataclass(frozen=True)
class Environment:
    """An interpreter, and where a tool's packages lie if they are not its own."""

    python: Path
    packages: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        folders = [str(folder) for folder in (ROOT, self.packages) if folder is not None]
        return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def environment_of(tool: str, work: Path, packages: Path | None = None) -> Environment:
    """One that has the tool: made where there is none, or this interpreter with the tool's packages in a folder."""
    if packages is not None or not TOOLS[tool].requirements:
        return Environment(Path(sys.executable), packages)
    return Environment(_made(tool, work))


def _made(tool: str, work: Path) -> Path:
    requirements = TOOLS[tool].requirements
    folder = work / f"venv-{tool}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        for packages in (("torch",), requirements):
            call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *packages)
        if tool == "llama.cpp":
            _build_llama_cpp(folder)
        ready.touch()
    return python


def llama_programs(work: Path) -> Path:
    """The folder of llama.cpp's programs, where its environment was made."""
    return work / "venv-llama.cpp" / "llama.cpp" / "bin"


def version_of(tool: str, environment: Environment) -> str:
    """Of the package, as that environment has it."""
    if tool == "llama.cpp":
        return _LLAMA_CPP.replace("==", " ")
    ask = f"import importlib.metadata as m; print(m.version({TOOLS[tool].package!r}))"
    words = [str(environment.python), "-c", ask]
    return subprocess.run(words, check=True, capture_output=True, text=True, env=environment.variables).stdout.strip()


def call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def _build_llama_cpp(folder: Path) -> None:
    """Into `llama.cpp` of the environment: programs in bin/, and the script that reads a model's folder."""
    python, source = folder / "bin" / "python", folder / "source"
    pip = (python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python")
    call(*pip, "-d", source, _LLAMA_CPP)
    with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    tree = next(source.glob("*/vendor/llama.cpp"))
    off = [f"-D{part}=OFF" for part in ("LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_UI")]
    call("cmake", "-S", tree, "-B", tree, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *off)
    call("cmake", "--build", tree, "--parallel", os.cpu_count() or 1, "--target", *_PROGRAMS)
    shutil.move(tree, folder / "llama.cpp")
    shutil.rmtree(source)
