"""docs/reference/security.md: every promise has a test; promises without a room of their own have theirs here."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.models.prompts import Prompts
from quantkit.sources import model_folder
from quantkit.strict_yaml import StrictLoader

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "security.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and "promise | where" not in line]
SOURCES = [file for room in ("quantkit", "runtime", "eval", "kernels") for file in (ROOT / room).rglob("*.py")]
FORBIDDEN = {  # what would run code that stands in a file
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "joblib.load", "numpy.load", "np.load"),
    *("eval", "exec", "marshal.loads", "shelve.open", "yaml.unsafe_load", "yaml.full_load", "os.system"),
}


def test_every_promise_names_its_tests() -> None:
    assert len(ROWS) > 20
    for promise, _, tests in ROWS:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, f"no test for: {promise.strip()}"
        for file, test in named:
            functions = {node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
                         if isinstance(node, ast.FunctionDef)}  # fmt: skip
            assert test in functions, f"{file} has no {test}"


def test_places_are_there() -> None:
    for _, where, _ in ROWS:
        for place in re.findall(r"`([\w/.]+)`", where):
            assert (ROOT / place).exists(), place


def dotted(function: ast.expr) -> str:
    """The name that is called, such as `torch.load`; empty for what is no name."""
    if isinstance(function, ast.Name):
        return function.id
    holder = dotted(function.value) if isinstance(function, ast.Attribute) else ""
    return f"{holder}.{function.attr}" if holder and isinstance(function, ast.Attribute) else ""


def switched_on(call: ast.Call) -> set[str]:
    """Keyword arguments that are True."""
    return {
        word.arg
        for word in call.keywords
        if word.arg and isinstance(word.value, ast.Constant) and word.value.value is True
    }


def test_nothing_here_runs_what_a_file_says() -> None:
    assert len(SOURCES) > 300
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert dotted(node.func) not in FORBIDDEN, file
                assert not switched_on(node) & {"trust_remote_code", "allow_pickle", "shell"}, file


def test_such_calls_would_be_seen() -> None:
    (one, other, nested) = (
        node for node in ast.walk(ast.parse("torch.load(f)(1)\neval(f, shell=True)")) if isinstance(node, ast.Call)
    )
    assert {dotted(node.func) for node in (one, other, nested)} == {"torch.load", "eval", ""}
    assert switched_on(other) == {"shell"}


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.getcwd []", "!!python/name:os.system", "a: !!python/tuple [1]"]
)
def test_yaml_makes_no_objects(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        yaml.load(text, StrictLoader)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_cannot_reach_python(template: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(template)
    prompts: Any = Prompts(load_tokenizer(folder))
    assert prompts.tokenizer.chat_template == template
    with pytest.raises(ApiError, match="chat template refuses"):
        prompts._encode_chat([{"role": "user", "content": "a"}], None, {})
    prompts.close()
