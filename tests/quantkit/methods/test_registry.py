"""Methods by name: quantkit's own by their files, others by entry points; and nobody else knows a method by name."""

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.methods import METHODS, Method, find_method, method_names, package_of, register, registry
from quantkit.methods.registry import methods_in
from quantkit.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[3]
PACKAGE = Path(__file__).parent / "toy_package"
WORTH_PARSING = re.compile(rf"""methods|Method|["']({"|".join(METHODS)})["']""")  # the rest cannot name a method
RECIPE = "summary: A toy.\nmethod: {name: toy-shrink, factor: 0.25}\nformat: {name: ct-packed, bits: 8}\n"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy package as if it were installed."""
    monkeypatch.syspath_prepend(PACKAGE)
    return PACKAGE


@pytest.fixture
def load(toy: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def from_text(text: str = RECIPE, *changes: str) -> Recipe:
        (tmp_path / "toy.yaml").write_text(text)
        return load_recipe(str(tmp_path / "toy.yaml"), changes)

    return from_text


def test_without_the_package_its_names_are_unknown() -> None:
    assert method_names() == ["awq", "best", "block-search", "gptq", "rtn", "smoothquant", "tuned"]
    with pytest.raises(
        InputError, match=r"unknown method 'gtpq'; did you mean 'gptq'\? Known: awq, best, block-search, gptq, rtn"
    ):
        find_method("gtpq")


def test_a_method_of_another_package_is_found_by_name(toy: Path) -> None:
    found = find_method("toy-shrink")
    assert issubclass(found, Method)
    assert found.__module__ == "quantkit_toy"
    assert (package_of("toy-shrink"), package_of("gptq")) == ("quantkit-toy", "quantkit")
    with pytest.raises(InputError, match="did you mean 'toy-shrink'"):
        find_method("toy-shrnk")


def test_a_script_registers_a_method_for_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run again, as a cell of a notebook is, it replaces itself and nobody else."""
    monkeypatch.setattr(registry, "_ADDED", {})

    def cell(name: str = "toy-copy") -> type[Method]:
        own = name

        @dataclass(frozen=True)
        class Copy(METHODS["rtn"]):  # type: ignore[misc, valid-type]
            name: ClassVar[str] = own

        return register(Copy)

    first, second = cell(), cell()
    assert first is not second
    assert find_method("toy-copy") is second
    assert "toy-copy" in method_names()
    with pytest.raises(InputError, match="method 'gptq' is known already"):
        cell("gptq")
    with pytest.raises(InputError, match="'toy-copy' is known already"):
        register(type("Other", (METHODS["rtn"],), {"name": "toy-copy"}))
    with pytest.raises(InputError, match="is no method"):
        register(Method)


def test_its_options_are_checked_like_those_of_built_in_methods(load: Callable[..., Recipe]) -> None:
    assert load(RECIPE, "method.steps=2").method.options == {"factor": 0.25, "steps": 2}
    for change, words in [
        ("method.factor=yes", r"with method.factor=yes: 'method.factor' is True, but must be a number"),
        ("method.steps=1.5", "'method.steps' is 1.5, but must be a whole number"),
        ("method.factor=2", "'method.factor' is 2.*, but must be above 0 and at most 1"),
        ("method.step=2", "unknown key 'method.step' for method 'toy-shrink'; did you mean 'steps'"),
        ("method=toy-needy", "key 'method.strength' is missing"),
        ("method.name=toy-shrnk", "'method' is 'toy-shrnk', which is not known; did you mean 'toy-shrink'"),
    ]:
        with pytest.raises(InputError, match=words):
            load(RECIPE, change)


def test_it_quantizes_and_is_named_in_card_and_log(
    load: Callable[..., Recipe], tiny_model: Path, tmp_path: Path
) -> None:
    recipe = load()
    assert not recipe.needs_data
    quantkit.quantize(tiny_model, recipe, tmp_path / "out")
    before, after = Checkpoint(tiny_model), Checkpoint(tmp_path / "out")
    module = "model.layers.1.mlp.up_proj"
    smaller = before.tensor(f"{module}.weight").float() / 4
    assert torch.allclose(after.weight(module, torch.float32, "cpu"), smaller, atol=float(smaller.abs().max()) / 100)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- toy-shrink" in card
    assert "method `toy-shrink` (factor 0.25, steps 1)" in card
    log = [json.loads(line) for line in (tmp_path / "out" / "quantization_log.jsonl").read_text().splitlines()]
    assert log[0]["recipe"]["method"] == {"name": "toy-shrink", "factor": 0.25}
    assert log[1]["log"]["toy_factor"] == 0.25


def test_a_dry_run_asks_it_for_its_cost(
    load: Callable[..., Recipe], tiny_model: Path, tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    load()
    arguments = ("-r", str(tmp_path / "toy.yaml"), "-o", str(tmp_path / "out"), "--dry-run", "--json")
    code, out, err = run_cli("quantize", str(tiny_model), *arguments)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["method"]["name"] == "toy-shrink"
    assert plan["method"]["options"] == {"factor": 0.25, "steps": 1}
    assert not plan["method"]["calibrated"]
    assert 8000 < plan["needs"]["seconds"] < 8100  # 1,000 for each of 8 groups


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("toy-broken", "cannot be loaded from quantkit_toy_broken:Anything: RuntimeError: needs a library that is not"),
        ("toy-function", "quantkit_toy:helper is no subclass of quantkit.methods.Method"),
        ("toy-misnamed", "quantkit_toy:Misnamed must have `name` = 'toy-misnamed'"),
    ],
)
def test_broken_packages_give_one_line_when_they_are_asked_for(
    load: Callable[..., Recipe], name: str, words: str
) -> None:
    assert name in method_names()
    with pytest.raises(InputError, match=words) as failure:
        load(RECIPE, "method=" + name)
    assert f"method '{name}' of package 'quantkit-toy'" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_names_that_are_taken_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("first", "second"):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[quantkit.methods]\ntwice = a:B\n")
    (info / "entry_points.txt").write_text("[quantkit.methods]\ntwice = a:B\ngptq = a:B\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="method 'gptq' is registered more than once, by quantkit and second"):
        load_recipe("gptq-w4g128")
    with pytest.raises(InputError, match=r"method 'twice' is registered more than once, by (first|second) and"):
        find_method("twice")
    assert find_method("rtn") is METHODS["rtn"]


def test_a_file_in_the_folder_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "more_methods"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    shutil.copy(ROOT / "quantkit" / "methods" / "grid.py", folder)
    code = (ROOT / "quantkit" / "methods" / "rtn.py").read_text()
    (folder / "mine.py").write_text(code.replace('= "rtn"', '= "mine"'))
    monkeypatch.syspath_prepend(tmp_path)
    assert list(methods_in([str(folder)], "more_methods")) == ["mine"]


def sources() -> Iterator[Path]:
    """All code but the methods' own; what is trained and published is no part of the program."""
    for folder in ("quantkit", "kernels", "runtime", "eval"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not file.is_relative_to(ROOT / "quantkit" / "methods"):
                yield file


def naming(code: str) -> Iterator[str]:
    """Where code imports a method's file, names its class, asks for the type of a method, or compares a name."""
    if not WORTH_PARSING.search(code):
        return
    classes = {kind.__name__ for kind in METHODS.values()}
    files = {kind.__module__ for kind in METHODS.values()}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            yield from (a.name for a in node.names if node.module in files or f"{node.module}.{a.name}" in files)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            yield from {name} & classes
        elif isinstance(node, ast.Compare | ast.Match | ast.Call):
            if not isinstance(node, ast.Call):
                yield from _constants(node) & METHODS.keys()
            elif getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                yield from {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & {"Method"}


def _constants(node: ast.Compare | ast.Match) -> set[str]:
    parts = [node] if isinstance(node, ast.Compare) else [case.pattern for case in node.cases]
    values = (each.value for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant))
    return {value for value in values if isinstance(value, str)}


def test_adding_a_method_touches_no_other_file() -> None:
    """No exceptions: names of formats that are spelled like methods are never compared as text either."""
    found = {str(file.relative_to(ROOT)): list(naming(file.read_text(encoding="utf-8"))) for file in sources()}
    assert len(found) > 300
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "from quantkit.methods.gptq import BLOCK",
        "from quantkit.methods import gptq",
        "import quantkit.methods.awq",
        "isinstance(method, rtn.RtnMethod)",
        "isinstance(method, Method)",
        "method.name == 'gptq'",
        "name in ('awq', 'other')",
        "match name:\n    case 'rtn':\n        pass",
    ],
)
def test_the_scan_sees_who_knows_a_method(code: str) -> None:
    assert list(naming(code))
