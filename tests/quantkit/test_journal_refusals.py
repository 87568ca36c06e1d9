"""Who may not go on with a journal, what a restart throws away, and what a full disk leaves."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from full_disk import largest_file
from quantkit.errors import InputError, StorageError
from quantkit.pipeline.journal import Journal

ARGUMENTS: dict[str, Any] = {
    "model": "demo",
    "recipe": {"method": "gptq", "format": {"name": "gptq", "bits": 4}},
    "seed": 0,
}


def interrupted(output: Path, count: int = 3, arguments: dict[str, Any] = ARGUMENTS) -> Path:
    """The journal of a run that ended after `count` units; returns its folder."""
    with Journal(output, arguments) as journal:
        for index in range(count):
            journal.commit({"weight": torch.full((4,), index)}, {})
    return journal.folder


def refusal(output: Path, arguments: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        Journal(output, arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_another_command_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out", 2)
    before = {file: file.read_bytes() for file in folder.glob("*.*")}
    recipe = {"method": "gptq", "format": {"name": "gptq", "bits": 3}}
    message = refusal(tmp_path / "out", ARGUMENTS | {"recipe": recipe})
    assert message == (
        f"{folder} holds 2 finished blocks of another run: recipe.format.bits was 4, now 3; "
        "run the old command to go on with it, or pass --restart to throw the old work away"
    )
    assert {file: file.read_bytes() for file in folder.glob("*.*")} == before
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert journal.finished == 2


def test_differences_are_named_and_shortened(tmp_path: Path) -> None:
    long = "/home/somebody/" + "x" * 100
    old = {"a": {"b": 1, "gone": []}, "path": f"{long}/one", "list": [1, 2], "same": 1.5, "text": "two\nlines", "t": 1}
    interrupted(tmp_path / "out", 1, old)
    new = {"a": {"b": None}, "path": f"{long}/two", "list": [1, 3, 4], "same": 1.5, "text": "one line", "t": True}
    message = refusal(tmp_path / "out", new)
    assert "1 finished block of" in message
    assert "a.b was 1, now null; path was" in message
    assert '/one", now "/home/somebody/' in message
    assert "x" * 60 not in message
    assert "list.1 was 2, now 3; list.2 was absent, now 4; and 3 more;" in message
    assert "same" not in message
    message = refusal(tmp_path / "out", old | {"text": "one line", "t": True})
    assert r'text was "two\nlines", now "one line"; t was 1, now true;' in message
    assert 'xxx/one", now "/home/somebody/xxx' in refusal(tmp_path / "out", old | {"path": f"{long}/two"})


def test_values_that_differ_only_in_the_middle_are_shown_whole(tmp_path: Path) -> None:
    side = "y" * 60
    interrupted(tmp_path / "out", 1, {"text": f"{side}1{side}"})
    message = refusal(tmp_path / "out", {"text": f"{side}2{side}"})
    assert f"{side}1{side}" in message
    assert f"{side}2{side}" in message


def test_restart_throws_the_old_work_away(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out", 3)
    other = ARGUMENTS | {"seed": 1}
    with Journal(tmp_path / "out", other, restart=True) as journal:
        assert journal.finished == 0
        assert list(folder.glob("unit-*")) == []
        journal.commit({}, {})
    with Journal(tmp_path / "out", other) as journal:
        assert journal.finished == 1
    assert "seed was 1, now 0" in refusal(tmp_path / "out", ARGUMENTS)
    with Journal(tmp_path / "out", other, restart=True) as journal:
        assert journal.finished == 0, "also when nothing else has changed"


def test_arguments_of_a_run_that_finished_nothing_bind_nobody(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out", 0)
    assert (folder / "arguments.json").exists()
    with Journal(tmp_path / "out", ARGUMENTS | {"seed": 1}) as journal:
        assert json.loads((folder / "arguments.json").read_text())["seed"] == 1
        assert journal.finished == 0


def test_a_file_where_the_journal_should_be(tmp_path: Path) -> None:
    (tmp_path / ".out.journal").write_text("mine")
    with pytest.raises(StorageError, match="cannot write in"):
        Journal(tmp_path / "out", ARGUMENTS)
    assert (tmp_path / ".out.journal").read_text() == "mine"


HOLD = """
import sys
import torch
from quantkit.pipeline.journal import Journal
with Journal(sys.argv[1], {"seed": 0}) as journal:
    journal.commit({"weight": torch.ones(2)}, {})
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_and_killed_ones_hold_nothing(tmp_path: Path) -> None:
    args = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        message = refusal(tmp_path / "out", {"seed": 0})
        assert f"{tmp_path / 'out'}: process {process.pid}; wait" in message
        with pytest.raises(InputError, match="another process"):
            Journal(tmp_path / "out", {"seed": 0}, restart=True)
        process.send_signal(signal.SIGKILL)
    with Journal(tmp_path / "out", {"seed": 0}) as journal:
        assert torch.equal(dict(journal.tensors(0))["weight"], torch.ones(2))


def fill(output: Path, sizes: list[int]) -> str:
    """What is said when the last of these units no longer fits."""

    def commit() -> None:
        with largest_file(20_000), Journal(output, {}) as journal:
            for size in sizes:
                journal.commit({"weight": torch.ones(size, dtype=torch.uint8)}, {"text": "x" * size})

    with pytest.raises(StorageError) as caught:
        commit()
    return str(caught.value)


@pytest.mark.parametrize("last", [19_800, 50_000], ids=["at the json", "at the tensors"])
def test_disk_full_keeps_what_is_finished(tmp_path: Path, last: int) -> None:
    nothing, something = fill(tmp_path / "nothing", [last]), fill(tmp_path / "something", [100, 100, last])
    assert nothing == f"no space left for {tmp_path}; nothing was kept, free some space and run again"
    assert something.startswith(f"no space left for {tmp_path}; kept: 2 finished blocks; free some space and run the")
    folder = tmp_path / ".something.journal"
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "unit-00002.safetensors").exists() == (last == 19_800)
    assert list(folder.glob("*.partial")) == []
    with Journal(tmp_path / "something", {}) as journal:
        assert journal.finished == 2
        journal.commit({"weight": torch.ones(last)}, {})
        assert journal.finished == 3
