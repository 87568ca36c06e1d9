"""What the sources import, and what pyproject.toml declares: `tests/quantkit/test_dependencies.py` compares them."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("quantkit", "kernels", "runtime", "eval")
# Where the name of a package says it only to people.
_IMPORTED_AS = {
    "grpcio": "grpc",
    "nvidia-ml-py": "pynvml",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyyaml": "yaml",
}
_NAME = re.compile(r"([\w.-]+)\s*(?:\[([\w,\s-]+)\])?")


@dataclass(frozen=True)
class Import:
    """One name that a file imports."""

    name: str  # such as `torch.nn`; of `from a import b` both `a` and `a.b`
    at_load: bool  # not inside a function, nor for type checkers alone

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def sources(*folders: str) -> list[Path]:
    """Python files, each once; the scripts that trained the bundled models are no part of the package."""
    files = (file for folder in folders for file in _walk(ROOT / folder))
    return sorted(file for file in files if "training" not in file.parts)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_symlink() or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _walk(entry)
        elif entry.suffix == ".py":
            yield entry


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "quantkit" else ("quantkit", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> list[Import]:
    reader = _Reader()
    reader.visit(ast.parse(file.read_text(encoding="utf-8")))
    return reader.found


def foreign(found: list[Import]) -> list[Import]:
    """Those of other projects."""
    return [one for one in found if one.package not in sys.stdlib_module_names and one.package != "quantkit"]


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Import] = []
        self._later = 0

    def _inside(self, node: ast.AST) -> None:
        self._later += 1
        self.generic_visit(node)
        self._later -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            self._inside(node)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, not self._later) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            self.found += [Import(name, not self._later) for name in names]


def declared() -> dict[str, set[str]]:
    """Extra -> names under which its packages are imported, those of extras that it takes in too; `` is the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    given = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: set(_packages(given, extra)) for extra in given}


def _packages(given: dict[str, list[str]], extra: str) -> Iterator[str]:
    for line in given[extra]:
        match = _NAME.match(line)
        assert match is not None, line
        if match[1] == "quantkit":
            for other in match[2].split(","):
                yield from _packages(given, other.strip())
        else:
            name = match[1].lower()
            yield _IMPORTED_AS.get(name, name.replace("-", "_"))
