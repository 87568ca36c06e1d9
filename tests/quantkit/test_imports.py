"""Which way imports point (see docs/architecture.md): an arrow in the wrong direction fails here."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "quantkit"

# Part -> parts of quantkit that it may import. A part is a module or package directly under quantkit/.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"pipeline", "reference", "runtime"},
    "__main__": {"cli"},
    "errors": set(),
    "progress": set(),
    "wording": set(),
    "host_memory": set(),
    "strict_yaml": set(),
    "formats": {"errors"},
    "arch": {"errors"},
    "sources": {"errors"},
    "bundled": set(),
    "methods": {"errors", "formats", "kernels"},
    "checkpoint": {"errors", "formats"},
    "storage": {"errors"},
    "checkpoint_writer": {"errors", "formats", "checkpoint", "storage"},
    "recipe": {"errors", "formats", "arch", "methods", "strict_yaml"},
    "engines": {"errors", "formats"},
    "gguf_import": {"errors", "formats", "arch", "checkpoint", "checkpoint_writer"},
    "kernels": {"errors", "formats"},
    "calibration": {"bundled"},
    "divergence": set(),
    "served": {"checkpoint"},
    "blocks": {"arch", "checkpoint", "formats", "host_memory", "served"},
    "passes": {"arch", "blocks", "checkpoint", "divergence", "formats", "methods"},
    "reference": {"errors", "formats", "checkpoint", "served", "sources"},
}
ALLOWED["pipeline"] = {"errors", "formats", "arch", "recipe", "checkpoint", "checkpoint_writer", "methods", "sources"}
ALLOWED["pipeline"] |= {"blocks", "bundled", "calibration", "divergence", "engines", "passes", "reference"}
ALLOWED["pipeline"] |= {"storage", "wording"}
ALLOWED["convert"] = ALLOWED["pipeline"] | {"pipeline"}
ALLOWED["inspection"] = {"errors", "formats", "arch", "checkpoint", "engines", "sources"}
ALLOWED["planning"] = {"arch", "checkpoint", "checkpoint_writer", "engines", "formats", "methods"}
ALLOWED["planning"] |= {"blocks", "passes", "recipe", "reference", "wording"}
ALLOWED["runtime"] = {
    "errors",
    "formats",
    "arch",
    "checkpoint",
    "inspection",
    "kernels",
    "recipe",
    "sources",
    "storage",
    "strict_yaml",
    "wording",
}
ALLOWED["eval"] = (
    ALLOWED["runtime"] | ALLOWED["convert"] | {"divergence"} | {"runtime", "bundled", "inspection", "planning"}
)
ALLOWED["medusa"] = {"bundled", "calibration", "checkpoint", "reference", "runtime", "sources", "wording"}
ALLOWED["launch"] = {"checkpoint", "engines", "errors", "formats", "inspection", "runtime", "sources", "wording"}
ALLOWED["deploy"] = {"checkpoint", "errors", "runtime", "sources", "strict_yaml", "wording"}
ALLOWED["cli"] = {*ALLOWED, "convert"}
ALLOWED["recipes"] = set()
EVERYWHERE = {"errors", "progress"}

# These run on a bare GPU image.
BARE = {"torch", "triton", "safetensors", "transformers", *sys.stdlib_module_names}


def python_files() -> list[Path]:
    folders = [PACKAGE, *(ROOT / name for name in ("kernels", "runtime", "eval", "recipes"))]
    return sorted(file for folder in folders for file in folder.rglob("*.py") if "training" not in file.parts)


def part_of(file: Path) -> str:
    inside = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.relative_to(ROOT)
    return inside.parts[0].removesuffix(".py")


def imported_modules(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("file", python_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_import_direction(file: Path) -> None:
    part = part_of(file)
    assert part in ALLOWED, f"quantkit/{part} is new: say in ALLOWED what it may import"
    for module in imported_modules(file):
        root, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if root == "quantkit" and target and target != part:
            assert target in ALLOWED[part] | EVERYWHERE, f"{part} must not import quantkit.{target}"
        if part in ("formats", "kernels"):
            assert root in BARE | {"quantkit"}, f"{part} must run on a bare GPU image, but imports {root}"


# The server from the lowest floor to the highest: rooms and modules. Each imports from floors below its own, and rooms
# from themselves; imports within functions and for type checkers count too.
SERVER_FLOORS: tuple[set[str], ...] = (
    {"config_file", "engine_process", "logs", "version"},
    {"engine_metrics", "errors", "settings", "shadow"},
    {"metrics", "schemas"},
    {"tools"},
    {"models"},
    {"middleware"},
    {"routes"},
    {"app"},
    {"serve"},
)


def server_imports() -> dict[str, set[str]]:
    """The modules of the server, by their names below quantkit.runtime.server, and which of them each imports."""
    folder, prefix = ROOT / "runtime" / "server", "quantkit.runtime.server."
    files = {".".join(file.relative_to(folder).with_suffix("").parts): file for file in folder.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):  # a module may be imported from its package
                named = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            found[name] |= {one.removeprefix(prefix) for one in named if one.startswith(prefix)} & files.keys()
    return found


def test_server_rooms_import_downwards() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(SERVER_FLOORS) for room in rooms}
    imports = server_imports()
    assert {name.partition(".")[0] for name in imports} == floor_of.keys(), "say on which floor a new room stands"
    assert "engine_process.client" in imports["models.served_model"]  # the walk sees something
    assert "routes.chat" in imports["app"]
    for name, targets in imports.items():
        room = name.partition(".")[0]
        for target in targets:
            other = target.partition(".")[0]
            assert other == room or floor_of[other] < floor_of[room], f"server: {name} must not import {target}"


def test_server_modules_import_in_no_circle() -> None:
    graph = TopologicalSorter(server_imports())
    graph.prepare()  # raises CycleError, which names the circle


def test_top_level_folders_shadow_nothing() -> None:
    for name in ("kernels", "runtime", "eval", "recipes"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (PACKAGE / name).is_symlink()
        assert (PACKAGE / name).resolve() == (ROOT / name).resolve()


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from quantkit.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    from quantkit.cli import COMMANDS

    listed = [line.split()[0] for line in run.stdout.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == list(COMMANDS)
    assert all(len(line.split()) > 2 for line in run.stdout.split("Commands:")[1].splitlines() if line.strip())
