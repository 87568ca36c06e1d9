"""Which way imports point (see docs/explanations/architecture.md): an arrow in the wrong direction fails here."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "quantkit"

# Part -> parts of quantkit that it may import. A part is a module or package directly under quantkit/.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"calibration", "eval", "pipeline", "reference", "runtime", "threads"},
    "__main__": {"cli"},
    "errors": set(),
    "extras": {"errors"},
    "progress": set(),
    "wording": set(),
    "host_memory": set(),
    "working_memory": set(),
    "defaults": set(),
    "strict_yaml": set(),
    "threads": set(),
    "devices": {"errors"},
    "formats": {"errors"},
    "stages": set(),
    "arch": {"errors", "stages"},
    "sources": {"errors", "gguf_import"},
    "gguf_view": {"errors", "formats"},
    "bundled": set(),
    "methods": {"errors", "formats", "kernels"},
    "checkpoint": {"arch", "errors", "formats", "gguf_view"},
    "storage": {"errors"},
    "checksums": set(),
    "checkpoint_writer": {"errors", "formats", "checkpoint", "storage", "checksums"},
    "recipe": {"errors", "formats", "arch", "methods", "strict_yaml"},
    "engine_runs": set(),
    "engines": {"engine_runs", "errors", "formats"},
    "gguf_import": {"errors", "formats", "arch", "checkpoint", "checkpoint_writer", "gguf_view", "stages"},
    "gguf_export": {"arch", "checkpoint", "checkpoint_writer", "checksums", "formats", "gguf_import", "reference"}
    | {"sources", "storage"},
    "kernels": {"errors", "formats"},
    "token_windows": {"errors"},
    "documents": set(),
    "calibration_mix": set(),
    "calibration": {"bundled", "calibration_mix", "documents", "token_windows"},
    "provenance": {"bundled", "checkpoint", "gguf_view", "sources"},
    "divergence": set(),
    "served": {"checkpoint", "formats"},
    "expert_check": {"arch", "checkpoint", "stages"},
    "expert_modules": {"arch", "stages"},
    "skeleton": {"arch", "checkpoint", "expert_modules"},
    "blocks": {"arch", "checkpoint", "formats", "host_memory", "served", "skeleton", "stages"} | {"working_memory"},
    "passes": {"arch", "blocks", "checkpoint", "divergence", "formats", "methods", "stages"}
    | {"token_windows", "served"},
    "reference": {"arch", "errors", "expert_modules", "formats", "checkpoint", "devices", "served", "sources"},
}
ALLOWED["reference"] |= {"expert_check"}
ALLOWED["pipeline"] = {"errors", "formats", "arch", "recipe", "checkpoint", "checkpoint_writer", "methods", "sources"}
ALLOWED["pipeline"] |= {"blocks", "bundled", "calibration", "divergence", "engines", "expert_check", "passes"}
ALLOWED["pipeline"] |= {"calibration_mix", "working_memory"}
ALLOWED["passes"] |= {"working_memory"}
ALLOWED["pipeline"] |= {"devices", "provenance", "reference", "skeleton", "stages", "storage", "checksums", "wording"}
ALLOWED["pipeline"] |= {"expert_modules", "gguf_export", "gguf_import", "token_windows", "touch_up"}
ALLOWED["touch_up"] = {"divergence", "errors", "formats", "methods"}
ALLOWED["convert"] = ALLOWED["pipeline"] | {"gguf_export", "pipeline"}
ALLOWED["inspection"] = {"errors", "formats", "arch", "checkpoint", "engines", "expert_check", "gguf_view", "sources"}
ALLOWED["planning"] = {"arch", "checkpoint", "checkpoint_writer", "engines", "formats", "methods"}
ALLOWED["planning"] |= {"blocks", "calibration_mix", "passes", "pipeline", "stages", "touch_up", "wording"}
ALLOWED["planning"] |= {"working_memory"}
ALLOWED["runtime"] = {
    "errors",
    "formats",
    "arch",
    "checkpoint",
    "devices",
    "expert_check",
    "host_memory",
    "inspection",
    "kernels",
    "recipe",
    "sources",
    "stages",
    "storage",
    "strict_yaml",
    "threads",
    "wording",
}
ALLOWED["eval"] = ALLOWED["runtime"] | ALLOWED["convert"]
ALLOWED["eval"] |= {"runtime", "bundled", "convert", "divergence", "documents", "expert_modules", "inspection"}
ALLOWED["eval"] |= {"planning"}
ALLOWED["medusa"] = {"bundled", "calibration", "checkpoint", "reference", "runtime", "sources", "wording"}
ALLOWED["medusa"] |= {"token_windows"}
ALLOWED["launch"] = {"checkpoint", "engines", "errors", "formats", "inspection", "runtime", "sources", "wording"}
ALLOWED["deploy"] = {"checkpoint", "errors", "runtime", "sources", "strict_yaml", "wording"}
ALLOWED["cli"] = {*ALLOWED, "convert"}
ALLOWED["recipes"] = set()
EVERYWHERE = {"defaults", "errors", "extras", "progress"}

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
        if part in ("formats", "kernels") and not (root == "llvmlite" and file.parent.name == "cpu"):
            assert root in BARE | {"quantkit"}, f"{part} must run on a bare GPU image, but imports {root}"


# The rooms of runtime/, from the ground up: a room may import from those below it, and from itself. Those of one floor
# do not know each other. Files that stand in runtime/ itself are the floor above all rooms but the server's.
FLOORS = (
    {"core"},
    {"model"},
    {"sampling", "output"},
    {"device"},
    {"engine"},
    {"drafters"},
    {"parallel"},
    {"runtime"},
    {"paper", "server"},
)
RUNTIME = {
    ".".join(("quantkit", *file.relative_to(ROOT).with_suffix("").parts)): file
    for file in sorted((ROOT / "runtime").rglob("*.py"))
}


def runtime_imports(file: Path) -> set[str]:
    """Modules of runtime/ that a file imports anywhere: at the top, inside functions, and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {module for module in found if module in RUNTIME}


def floor_of(module: str) -> tuple[int, str]:
    inside = module.removeprefix("quantkit.runtime.").split(".")
    room = inside[0] if len(inside) > 1 else "runtime"
    floor = next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)
    assert floor is not None, f"runtime/{room} is new: give it a floor in FLOORS"
    return floor, room


@pytest.mark.parametrize("module", RUNTIME)
def test_runtime_imports_point_down(module: str) -> None:
    floor, room = floor_of(module)
    for imported in sorted(runtime_imports(RUNTIME[module])):
        below, other = floor_of(imported)
        assert below < floor or other == room, f"{module} ({room}) must not import {imported}: it runs up a floor"


def test_runtime_has_no_circle_of_imports() -> None:
    graph = {name: runtime_imports(file) for name, file in RUNTIME.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " -> ".join(error.args[1]))


# The server from the lowest floor to the highest: rooms and modules. Each imports from floors below its own, and rooms
# from themselves; imports within functions and for type checkers count too.
SERVER = "quantkit.runtime.server."
SERVER_FLOORS: tuple[set[str], ...] = (
    {"config_file", "connections", "engine_process", "hosts", "logs", "version", "virtual_models"},
    {"async_llm", "engine_metrics", "errors", "settings", "shadow"},
    {"gpu_metrics", "metrics", "schemas", "tracing"},
    {"tools"},
    {"models"},
    {"middleware"},
    {"routes"},
    {"app"},
    {"serve"},
)


def test_server_rooms_import_downwards() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(SERVER_FLOORS) for room in rooms}
    imports = {
        module.removeprefix(SERVER): {
            one.removeprefix(SERVER) for one in runtime_imports(file) if one.startswith(SERVER)
        }
        for module, file in RUNTIME.items()
        if module.startswith(SERVER)
    }
    assert {name.partition(".")[0] for name in imports} == floor_of.keys(), "say on which floor a new room stands"
    assert "engine_process.client" in imports["models.served_model"]  # the walk sees something
    assert "routes.chat" in imports["app"]
    for name, targets in imports.items():
        room = name.partition(".")[0]
        for target in targets:
            other = target.partition(".")[0]
            assert other == room or floor_of[other] < floor_of[room], f"server: {name} must not import {target}"


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
