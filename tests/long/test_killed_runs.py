"""Runs of the real command that are killed: the same command goes on, and its result is the same to the byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.long
QUANTIZE = (sys.executable, "-m", "quantkit", "quantize", "--samples", "8", "--seq-len", "128", "-o", "out")
QUANTIZE += ("--quality-windows", "1")
COMMAND = (*QUANTIZE, "demo", "-r", "gptq-w4g128")
CHOOSING = {  # each block is made by one of several candidates
    "best": (*QUANTIZE, "demo-draft", "-r", "best-w4g64"),
    "tuned": (*QUANTIZE, "demo-draft", "-r", "tuned-w4g64", "--set", "method.steps=3"),
}
KILLS = 6
BLOCKS = 5  # of the bundled model
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # sums depend on the number of threads; one waits for nobody


class Finished(NamedTuple):
    """What the command makes when nobody disturbs it."""

    files: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("undisturbed")
    started = time.monotonic()
    complete(folder)
    return Finished(files_of(folder), time.monotonic() - started)


def start(folder: Path, command: tuple[str, ...] = COMMAND) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=ONE_THREAD, stdout=pipe, stderr=pipe, text=True)


def complete(folder: Path, *more: str, command: tuple[str, ...] = COMMAND) -> None:
    """Runs the command to its end, which must leave the output and nothing else."""
    run = subprocess.run([*command, *more], cwd=folder, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in folder.iterdir()] == ["out"]


def refused(folder: Path, *more: str) -> str:
    """The one line that the command ends with."""
    run = subprocess.run([*COMMAND, *more], cwd=folder, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("quantkit: ")
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr


def kill_after(process: subprocess.Popen[str], folder: Path, blocks: int, seconds: float = 0) -> bool:
    """Waits for finished blocks, then some time more; False when the process had ended before, and ended well."""
    while process.poll() is None and len(units(folder)) < blocks:
        time.sleep(0.002)
    due = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < due:
        time.sleep(0.002)
    process.kill()
    _, stderr = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), stderr
    return process.returncode != 0


def units(folder: Path) -> list[Path]:
    return sorted((folder / ".out.journal").glob("unit-*.json"))


def files_of(folder: Path) -> dict[str, Any]:
    """Every file of the output by name: its bytes; of a log its lines, without how long things took."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in (folder / "out").rglob("*") if path.is_file()):
        name = str(file.relative_to(folder / "out"))
        found[name] = file.read_bytes()
        if file.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in file.read_text().splitlines()]
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def assert_same(folder: Path, expected: Finished) -> None:
    files = files_of(folder)
    assert list(files) == list(expected.files)
    different = [name for name, content in files.items() if content != expected.files[name]]
    assert not different, f"{', '.join(different)} of {folder / 'out'}"


def test_killed_at_any_moment(undisturbed: Finished, tmp_path: Path) -> None:
    """Every other kill waits for a few blocks first: on a busy machine the clock alone says little."""
    dice = random.Random(0)
    went_on = 0
    for turn in range(KILLS):
        folder = tmp_path / f"turn-{turn}"
        folder.mkdir()
        blocks = dice.randint(1, BLOCKS - 1) if turn % 2 else 0
        seconds = undisturbed.seconds * (dice.random() / BLOCKS if blocks else (turn + dice.random()) / KILLS)
        kill_after(start(folder), folder, blocks, seconds)
        if not (folder / "out").exists():
            went_on += len(units(folder)) > 0
            complete(folder)
        assert_same(folder, undisturbed)
    assert went_on >= 2, "too few kills came between the first block and the end"


def test_killed_after_every_block(undisturbed: Finished, tmp_path: Path) -> None:
    """Every start does one more block, and none does a block again."""
    written: dict[Path, int] = {}
    for block in range(1, BLOCKS):
        assert kill_after(start(tmp_path), tmp_path, block)
        now = {file: file.stat().st_mtime_ns for file in units(tmp_path)}
        assert now.items() >= written.items(), "a finished block was done again"
        assert len(now) > len(written)
        written = now
    complete(tmp_path)
    assert_same(tmp_path, undisturbed)


@pytest.mark.parametrize("command", CHOOSING.values(), ids=CHOOSING)
def test_killed_while_it_chooses(command: tuple[str, ...], tmp_path: Path) -> None:
    """Between two blocks of `demo-draft`, and in the middle of the second."""
    whole = tmp_path / "whole"
    whole.mkdir()
    complete(whole, command=command)
    expected = Finished(files_of(whole), 0)
    for seconds in (0, 2):
        folder = tmp_path / f"killed-{seconds}"
        folder.mkdir()
        assert kill_after(start(folder, command), folder, 1, seconds)
        assert units(folder)
        complete(folder, command=command)
        assert_same(folder, expected)


@pytest.mark.parametrize("kind", ["unit", "state"])
def test_damaged_between_two_runs(undisturbed: Finished, tmp_path: Path, kind: str) -> None:
    """What a crash of the whole machine may leave: the last file is there, but not all of its content."""
    assert kill_after(start(tmp_path), tmp_path, 2)
    last = max((tmp_path / ".out.journal").glob(f"{kind}-*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1000] + bytes(1000))
    complete(tmp_path)
    assert_same(tmp_path, undisturbed)


def test_another_command_does_not_go_on(undisturbed: Finished, tmp_path: Path) -> None:
    assert kill_after(start(tmp_path), tmp_path, 1)
    before = {file: file.read_bytes() for file in units(tmp_path)}
    message = refused(tmp_path, "--seed", "1")
    assert "seed was 0, now 1" in message
    assert "--restart" in message
    assert {file: file.read_bytes() for file in units(tmp_path)} == before
    complete(tmp_path, "--seed", "1", "--restart")
    with pytest.raises(AssertionError):
        assert_same(tmp_path, undisturbed)


def test_two_at_the_same_time(undisturbed: Finished, tmp_path: Path) -> None:
    first = start(tmp_path)
    while not units(tmp_path):
        assert first.poll() is None
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)  # it cannot end while the second tries
    try:
        message = refused(tmp_path)
        assert f"process {first.pid}" in message
        assert "--restart" not in message
        refused(tmp_path, "--restart")
    finally:
        first.send_signal(signal.SIGCONT)
    _, stderr = first.communicate()
    assert first.returncode == 0, stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same(tmp_path, undisturbed)
