"""pyproject.toml declares what the sources import, and the core runs without the extras."""

import pytest

from package_imports import FOLDERS, ROOT, Import, declared, foreign, imports_of, module_name, sources
from quantkit.extras import EXTRAS

DECLARED = declared()
CORE = DECLARED[""]
# Extra -> where modules stand that load its packages. All other modules load without it.
ROOMS = {
    "serve": ("runtime/server/", "quantkit/deploy/", "eval/behaviour/"),
    "report": ("eval/report/", "eval/batching/plot.py"),
    "gguf": (
        "quantkit/gguf_import/",
        "quantkit/gguf_export/",
        "quantkit/pipeline/gguf_file.py",
        "eval/peers/",
        "eval/interop/",
    ),
    "calibration": (),
    "ray": ("quantkit/deploy/",),
    "tasks": ("eval/tasks/",),
    "traces": (),
}
WITH_TORCH = {"triton"}  # comes with every torch for CUDA; without it there is nothing to compile for
# Imported by lm-eval's own models, by uvicorn where they are, and by a server that does without.
UNSEEN = {"accelerate", "httptools", "pynvml", "uvloop"}
# Other projects' packages, run in environments of their own beside ours.
PEERS = {"auto_round", "bitsandbytes", "compressed_tensors", "gptqmodel", "llmcompressor", "vllm"}
PEER_FOLDERS = ("eval/peers/", "eval/interop/", "eval/kernels/peers.py", "tests/interop/", "tests/golden/")

SUPPORT = {entry.stem for entry in (ROOT / "tests" / "support").iterdir()}
Files = dict[str, list[Import]]

pytestmark = pytest.mark.xdist_group("dependencies")


@pytest.fixture(scope="module")
def files() -> Files:
    return {str(file.relative_to(ROOT)): imports_of(file) for file in sources(*FOLDERS)}


def undeclared(files: Files, known: set[str]) -> list[str]:
    return sorted(
        f"{file} imports {one.package}"
        for file, found in files.items()
        for one in foreign(found)
        if one.package not in known and not (one.package in PEERS and file.startswith(PEER_FOLDERS))
    )


def test_every_import_is_declared(files: Files) -> None:
    assert len(files) > 400  # the walk sees something
    assert undeclared(files, set().union(CORE, WITH_TORCH, *(DECLARED[extra] for extra in EXTRAS))) == []


def test_tests_import_what_dev_declares() -> None:
    tests = {str(file.relative_to(ROOT)): imports_of(file) for file in sources("tests")}
    assert undeclared(tests, CORE | DECLARED["dev"] | SUPPORT | {"_pytest"}) == []


def test_everything_declared_is_imported(files: Files) -> None:
    used = {one.package for found in files.values() for one in foreign(found)}
    assert used >= CORE
    for extra in EXTRAS:
        assert DECLARED[extra] - UNSEEN <= used, extra


def test_the_table_of_extras_is_that_of_pyproject() -> None:
    assert set(EXTRAS) == set(DECLARED) - {"", "all", "dev", "docs", "interop"} == set(ROOMS)
    for extra, packages in EXTRAS.items():
        taken_in = DECLARED["serve"] if extra == "ray" else set()
        imported = {package.partition(".")[0] for package in packages}
        assert imported - UNSEEN == DECLARED[extra] - UNSEEN - taken_in, extra
        assert imported <= DECLARED[extra], extra
    assert DECLARED["all"] == set().union(*(DECLARED[extra] for extra in EXTRAS if extra != "traces"))


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_core_loads_without(extra: str, files: Files) -> None:
    """Whatever loads a package of the extra, itself or through other modules, stands where the extra's modules do."""
    modules = {module_name(ROOT / file): file for file in files}
    at_load = {module: {one.name for one in files[file] if one.at_load} for module, file in modules.items()}
    only_here = {package.partition(".")[0] for package in EXTRAS[extra]} - CORE
    need = {module for module, names in at_load.items() if {name.partition(".")[0] for name in names} & only_here}
    while grown := {
        module for module, names in at_load.items() if module not in need and (names | parents(module)) & need
    }:
        need |= grown
    outside = [modules[module] for module in need if not modules[module].startswith(ROOMS[extra])]
    assert sorted(outside) == []
    assert need or not ROOMS[extra]


def parents(module: str) -> set[str]:
    """Packages that are loaded before it."""
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}
