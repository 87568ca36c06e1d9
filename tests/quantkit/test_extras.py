"""Commands whose extra is not installed: one line that says what to type. Their packages are hidden in a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.extras import EXTRAS, require

ROOT = Path(__file__).parents[2]

# Extra -> commands that need it, and what they say before `pip install`.
COMMANDS: dict[str, tuple[tuple[list[str], str], ...]] = {
    "serve": (
        (["serve", "demo-draft"], "quantkit serve needs fastapi, starlette, uvicorn, prometheus_client"),
        (["eval", "demo-draft", "--behaviour"], f"quantkit eval --behaviour needs {', '.join(EXTRAS['serve'])}"),
    ),
    "report": (
        (["demo"], "a report needs matplotlib"),
        (["compare", "demo-draft", "-o", "report"], "a report needs matplotlib"),
        (["bench", "batching", "demo-draft", "--plot", "batching.png"], "--plot needs matplotlib"),
    ),
    "gguf": (
        (["import", "model.gguf", "-o", "model"], "quantkit import needs gguf"),
        (["inspect", "model.gguf"], "model.gguf needs gguf"),
        (["convert", "demo-draft", "--to", "gguf", "-o", "new.gguf"], "quantkit convert --to gguf needs gguf"),
        (["quantize", "demo-draft", "-r", "q4_k_m", "-o", "new.gguf"], "the recipe q4_k_m needs gguf"),
    ),
    "calibration": (
        (["quantize", "demo-draft", "-r", "gptq-w4g128", "-o", "new", "--text", "datasets:org/name"],
         "datasets:org/name needs datasets"),
        (["eval", "demo-draft", "--text", "wikitext2"],
         "datasets:Salesforce/wikitext:wikitext-2-raw-v1@test needs datasets"),
    ),
    "ray": ((["deploy", "--status"], "quantkit deploy needs ray, grpc"),),
    "traces": (
        (["serve", "demo-draft", "--otlp-endpoint", "http://127.0.0.1:4318"],
         "--otlp-endpoint needs opentelemetry.sdk, opentelemetry.exporter.otlp.proto.http"),
    ),
    "tasks": (
        (["eval", "demo-draft", "--tasks", "local"], "quantkit eval --tasks needs lm_eval, accelerate, datasets"),
    ),
}  # fmt: skip

PROGRAM = """
import contextlib, io, json, sys
from hidden_packages import hide
hidden, commands = json.loads(sys.argv[1])
hide(hidden)
from quantkit.cli import main
answers = []
for command in commands:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command)
        except SystemExit as end:
            code = end.code
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def answers(commands: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of every command, in a process that finds no package of any extra."""
    hidden = sorted({name for names in EXTRAS.values() for name in names})
    program = [sys.executable, "-c", PROGRAM, json.dumps([hidden, commands])]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    environment = os.environ | {"PYTHONPATH": paths}
    run = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [tuple(answer) for answer in json.loads(run.stdout.splitlines()[-1])]


def test_a_missing_extra_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    cases = [(extra, *case) for extra, given in COMMANDS.items() for case in given]
    assert COMMANDS.keys() == EXTRAS.keys()
    found = answers([command for _, command, _ in cases], tmp_path)
    for (extra, command, words), (code, out, err) in zip(cases, found, strict=True):
        assert err == f"quantkit: {words}; pip install 'quantkit[{extra}]'\n", command
        assert (code, out) == (2, ""), command
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.long
def test_the_core_works_without_extras(tmp_path: Path) -> None:
    commands = [
        ["quantize", "demo-draft", "-r", "rtn-w4g128", "-o", "w4", "--quality-windows", "1", "--device", "cpu"],
        ["inspect", "w4"],
        ["eval", "w4", "--base", "demo-draft", "--max-windows", "1", "--device", "cpu"],
        ["generate", "w4", "The function", "--max-tokens", "2", "--device", "cpu"],
        ["plan", "llama-3.1-8b", "--gpu", "h200"],
        ["recipes"],
        ["serve", "--help"],
        ["deploy", "--help"],
    ]
    for command, (code, out, err) in zip(commands, answers(commands, tmp_path), strict=True):
        assert code == 0, (command, err)
        assert out, command


def test_only_what_is_missing_is_named() -> None:
    require("nothing", "serve")  # all of it is installed here
    with pytest.raises(AssertionError, match="not all of the extra 'gguf'"):
        require("a command", "gguf", "matplotlib")


def test_a_part_of_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # Python's own way to say that there is none
    require("a server", "serve", "fastapi")
    with pytest.raises(InputError) as caught:
        require("structured output", "serve")
    assert str(caught.value) == "structured output needs llguidance; pip install 'quantkit[serve]'"
