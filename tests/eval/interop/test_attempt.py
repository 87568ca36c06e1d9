"""Engines in a process beside this one: what loads, what does not, what dies and what hangs; and how runs go on."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError, QuantkitError, StorageError
from quantkit.eval.interop import rows
from quantkit.eval.interop.adapters import version_of
from quantkit.eval.interop.attempt import Setting, attempt_all
from quantkit.eval.interop.attempt import main as worker
from quantkit.eval.interop.checkpoints import chosen, make
from quantkit.eval.interop.compare import Seen, first_line, try_checkpoint
from quantkit.eval.interop.run import add_arguments, run
from quantkit.eval.peers.vllm_load import VllmAdapter
from quantkit.sources import model_folder

FOLDERS = [Path(name) for name in ("one", "two", "three")]
YES = Seen(True, perplexity_there=2.0, perplexity_here=2.0, difference=0.0).to_dict()


@dataclass(frozen=True)
class Scripted(Setting):
    """The other process is a few lines of Python instead of an engine; `left` are the folders, `say` answers."""

    script: str = ""

    def command(self, report: Path, folders: Sequence[Path]) -> list[str]:
        code = f"""
import json, os, sys, time
left = {[folder.name for folder in folders]}
def say(name):
    with open({str(report)!r}, "a") as file:
        file.write(json.dumps(dict(folder=name, seen={YES})) + "\\n")
{self.script}
"""
        return [sys.executable, "-c", code]


def attempt(script: str, tmp_path: Path, limit: float = 20.0) -> dict[str, Seen]:
    setting = Scripted("any", "cpu", 1, 8, limit, script=script)
    return {folder.name: seen for folder, seen in attempt_all(setting, FOLDERS, tmp_path / "any.log")}


def test_one_process_answers_for_all(tmp_path: Path) -> None:
    found = attempt("for name in left: say(name)", tmp_path)
    assert [seen.loads for seen in found.values()] == [True] * 3


def test_a_process_that_is_not_as_good_as_new_is_replaced(tmp_path: Path) -> None:
    found = attempt("print(len(left), flush=True)\nsay(left[0])", tmp_path)
    assert [seen.loads for seen in found.values()] == [True] * 3
    assert (tmp_path / "any.log").read_text().split() == ["3", "2", "1"]


def test_what_kills_the_process_does_not_load_and_the_next_has_its_turn(tmp_path: Path) -> None:
    script = "for name in left:\n    if name == 'two': print('no kernel', flush=True); os._exit(9)\n    say(name)"
    found = attempt(script, tmp_path)
    assert {name: seen.loads for name, seen in found.items()} == {"one": True, "two": False, "three": True}
    assert found["two"].reason == "the process ended with code 9: no kernel"


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    script = "for name in left:\n    if name == 'one': time.sleep(60)\n    say(name)"
    found = attempt(script, tmp_path, limit=1.0)
    assert {name: seen.loads for name, seen in found.items()} == {"one": None, "two": True, "three": True}
    assert found["one"].reason == "no answer within 1 s"


def test_a_failure_of_our_own_is_not_blamed_on_the_engine(tmp_path: Path) -> None:
    found = attempt("print('no tokenizer', flush=True); os._exit(70)", tmp_path)
    assert [seen.loads for seen in found.values()] == [None] * 3
    assert found["one"].reason == "our own part failed: no tokenizer"


def test_answers_about_another_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="an answer about two came where one about one was due"):
        attempt("say('two')", tmp_path)


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """Left alone it would go on computing, and hold memory."""
    inner = "import sys, time; from quantkit.eval.interop.parent import end_with"
    inner += "; end_with(int(sys.argv[1])); time.sleep(60)"
    outer = f"import os, subprocess, sys; words = [sys.executable, '-c', {inner!r}, str(os.getpid())]"
    outer += "; print(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    printed = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True).stdout
    left, until = Path("/proc") / printed.strip(), time.monotonic() + 30
    while left.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not left.exists()


def test_reasons_are_one_line() -> None:
    wrapped = RuntimeError("shallow")
    wrapped.__cause__ = KeyError("deep")
    assert first_line(wrapped) == "KeyError: 'deep'"
    assert first_line(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert first_line(ValueError()) == "ValueError"
    headed = ValueError("1 validation error for ModelConfig\n  Value error, no such method [type=value_error]")
    assert first_line(headed) == "ValueError: Value error, no such method [type=value_error]"
    assert len(first_line(ValueError("x" * 1000))) == 240


class Failing(VllmAdapter):
    """Raises what an engine may say."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said

    def load(self, checkpoint: Checkpoint, window: int) -> str:
        raise AssertionError(self.said)


def test_an_engine_that_other_processes_disturbed_is_not_settled() -> None:
    """The checkpoint had no part in it."""
    checkpoint, ids = Checkpoint(model_folder("demo-draft")), torch.zeros(1, 4, dtype=torch.long)
    disturbed, refused = "Error in memory profiling. Initial free memory 135.27 GiB, ...", "no kernel for 5 bits"
    assert try_checkpoint(Failing(disturbed), checkpoint, ids, "cpu").loads is None
    assert try_checkpoint(Failing(refused), checkpoint, ids, "cpu").loads is False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("interop")
    make("demo-draft", made, chosen(["rtn-w4g128"]), "cpu")
    return made


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    small = ["--windows", "2", "--window", "32", "--device", "cpu", "--output", str(folder / "rows.csv")]
    return parser.parse_args([str(folder), *small, *more])


def attempt_here(setting: Setting, folders: Sequence[Path], log: Path) -> Iterator[tuple[Path, Seen]]:
    """What the other process does, in this one: it would import everything once more."""
    report = log.with_suffix(".jsonl")
    if folders:
        worker(setting.command(report, folders)[3:])
        answers = [json.loads(line) for line in report.read_text().splitlines()]
        yield from ((Path(answer["folder"]), Seen(**answer["seen"])) for answer in answers)


def test_transformers_computes_what_our_reference_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without the packages that read quantized folders: those are not run, and get no row."""
    monkeypatch.setattr("quantkit.eval.interop.run.attempt_all", attempt_here)
    monkeypatch.setattr("quantkit.eval.interop.compare.version_of", lambda name: "1.0" if name == "torch" else "")
    said: list[str] = []
    given = arguments(folder, "--only", "unquantized,rtn-w4g128")
    (row,) = run("transformers", given, ["python", "-m", "this"], said.append)
    assert (row["checkpoint"], row["layout"]) == ("unquantized", "unquantized")
    assert (row["loads"], row["dtype_there"], row["dtype_here"]) == ("yes", "float32", "float32")
    assert row["perplexity_there"] == row["perplexity_here"]
    assert float(row["mean_abs_logprob_difference"]) < 1e-5
    assert (row["model"], row["windows"], row["command"]) == ("demo-draft", "2 x 32", "python -m this")
    assert any(line.startswith("rtn-w4g128: not run, transformers needs gptqmodel and optimum") for line in said)
    before = rows.read(given.output)
    run("transformers", given, ["again"], said.append)  # nothing left to do
    assert rows.read(given.output) == before


def test_an_engine_that_is_not_here_is_refused(folder: Path) -> None:
    if version_of("vllm"):
        pytest.skip("it is here")
    with pytest.raises(InputError, match="vLLM is not installed here"):
        run("vLLM", arguments(folder), [])


def test_a_folder_that_was_not_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="make it first, or give --make MODEL"):
        run("transformers", arguments(tmp_path), [])
