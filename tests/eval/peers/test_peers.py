"""Other projects' quantizers beside ours: what is asked of them, what is kept, how it is shown."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from quantkit.errors import InputError, QuantkitError, StorageError
from quantkit.eval.peers import run as running
from quantkit.eval.peers.__main__ import command, main
from quantkit.eval.peers.bases import Base, find_base
from quantkit.eval.peers.jobs import JOBS, TOOLS, Job, chosen
from quantkit.eval.peers.rows import Row, keep, newest, read
from quantkit.eval.peers.run import Bench, make, run
from quantkit.eval.peers.table import markdown
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

ROW = Row(
    date="2026-11-17", machine="a machine", tool="GPTQModel", version="7.6.0", method="gptq", bits=4, group=64,
    steps=None, model="smollm2", origin="as given", calibration="default", calibrated_on="calibration.txt", seconds=100,
    peak_host_gib=1.5, peak_gpu_gib=0, bits_per_weight=4.358, perplexity=30.0, base_perplexity=24.0, kl=0.25,
    top1_agreement=0.75, protocol="a text", command="python", measured_by="quantkit eval",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The smaller bundled model on one window."""
    work = tmp_path_factory.mktemp("peers")
    text = work / "some text.txt"
    text.write_text("The function returns a list of names, and a value for each of them.\n" * 200, encoding="utf-8")
    base = Base("small", model_folder("demo-draft"), 64, str(text), {"default": str(text)}, windows=1, compared=1)
    return Bench(base, work, "cpu", {"auto-round": work})


def test_every_recipe_of_ours_exists() -> None:
    for job in JOBS:
        if job.tool == "quantkit":
            for model, group in (("demo", 128), ("smollm2", 64)):
                if job.model in (None, model):
                    load_recipe(job.recipe(group))


def test_every_tool_has_a_job_and_a_script_with_pinned_packages() -> None:
    assert {job.tool for job in JOBS} == set(TOOLS)
    scripts = {file.stem for file in Path(running.__file__).with_name("tools").glob("by_*.py")}
    assert scripts == {tool.script for tool in TOOLS.values() if tool.script}
    for tool in TOOLS.values():
        assert any("==" in requirement for requirement in tool.requirements) == bool(tool.script)


def test_jobs_are_chosen_by_model_tool_and_method() -> None:
    assert {job.tool for job in chosen("smollm2", (), ())} == set(TOOLS) - {"llama.cpp"}
    assert [job.bits for job in chosen("demo", ("GPTQModel",), ("gptq",))] == [4, 3]


@pytest.mark.long
def test_ours_is_made_measured_and_kept(bench: Bench) -> None:
    row = run(bench, Job("quantkit", "rtn", calibrated=False), None)
    assert (row.tool, row.method, row.calibration, row.calibrated_on) == ("quantkit", "rtn", "none", "")
    assert row.command == "quantkit quantize small -r rtn-w4g64 -o OUT --quality-windows 0 --device cpu"
    assert row.measured_by.startswith("quantkit eval OUT --base small --text 'some text.txt' --max-windows 1")
    assert 4 < row.bits_per_weight < 5
    assert row.perplexity != row.base_perplexity
    assert row.kl > 0
    assert row.seconds > 0
    assert 0.1 < row.peak_host_gib < 4
    file = bench.work / "rows.csv"
    keep(file, row)
    assert read(file) == [row]


def test_others_get_the_tokens_that_we_would_take(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that is not here says so with its last line; it was given tokens, and its whole output is kept."""
    with pytest.raises(QuantkitError, match=r"auto-round ended with exit code 1: ModuleNotFoundError: .*auto_round"):
        make(bench, Job("auto-round", "auto-round", steps=3), "default")
    tokens = load_file(bench.work / "small-some text.safetensors")["tokens"]
    assert tokens.shape[1] == 512
    assert "Traceback" in (bench.work / "made" / "small-auto-round-auto-round-4-3-default.log").read_text()


def test_memory_of_a_module_is_left_in_a_file(tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "quantkit.eval.peers.tools.watched", tmp_path / "peaks", "json.tool", "--help"]
    done = subprocess.run([str(word) for word in asked], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage" in done.stdout
    peaks = json.loads((tmp_path / "peaks").read_text())
    assert peaks["gpu"] == 0
    assert 0 < peaks["host"] < 0.2, "not what the process had that started it"


def test_the_newest_row_of_a_kind_counts(tmp_path: Path) -> None:
    file = tmp_path / "peers.csv"
    steps = replace(ROW, tool="auto-round", steps=1000)
    for row in (ROW, steps, replace(ROW, perplexity=29.0), replace(steps, steps=None)):
        keep(file, row)
    found = newest(read(file))
    assert [(row.tool, row.steps, row.perplexity) for row in found] == [
        ("GPTQModel", None, 29.0), ("auto-round", 1000, 30.0), ("auto-round", None, 30.0),
    ]  # fmt: skip


def test_both_calibrations_stand_side_by_side() -> None:
    rows = [
        replace(ROW, model="demo"),
        ROW,
        replace(ROW, calibration="in-domain", perplexity=28.0, kl=0.2),
        replace(ROW, tool="quantkit", method="nf4", calibration="none", kl=0.28),
        replace(ROW, bits=3, kl=0.9),
        replace(ROW, bits=8, method="llm-int8", kl=0.01),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(rows, "smollm2").splitlines()[2:]]
    assert [(cells[0], cells[1]) for cells in lines] == [
        ("8", "llm-int8"), ("4", "gptq g64"), ("4", "nf4"), ("3", "gptq g64"),
    ]  # fmt: skip
    assert lines[1][4:] == ["30.00 / 0.2500 / 75.0 %", "28.00 / 0.2000 / 75.0 %", "100 / 100"]
    assert lines[2][4] == lines[2][5]
    assert lines[3][5] == ""


def test_the_command_prints_a_table_of_rows(tmp_path: Path) -> None:
    keep(tmp_path / "rows.csv", ROW)
    done = CliRunner().invoke(command, ["--table", "--model", "smollm2", "-o", str(tmp_path / "rows.csv")])
    assert done.exit_code == 0
    assert "| GPTQModel 7.6.0 | 4.36 | 30.00 / 0.2500 / 75.0 % |" in done.output


@pytest.mark.parametrize("given", ["auto-round", "auto-round=/nowhere", "vllm=."])
def test_packages_of_a_tool(given: str) -> None:
    done = CliRunner().invoke(command, ["--packages", given])
    assert done.exit_code == 2
    assert f"'{given}' is no TOOL=FOLDER; tools: quantkit, llm-compressor" in done.output


def test_what_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("peers", "--model", "smollm2", "--wikitext", tmp_path / "none", "--work", tmp_path / "work")
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as seen:
        main()
    assert seen.value.code == StorageError.exit_code
    error = capsys.readouterr().err
    assert error.startswith("peers: ")
    assert error.count("\n") == 1


def test_wikitext_is_found_by_its_names(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(StorageError, match=r"has 0 files wiki\*test\*"):
        find_base("smollm2", tmp_path, tmp_path)
    for name in ("wiki.test.raw", "wiki.valid.raw"):
        (tmp_path / name).touch()
    base = find_base("smollm2", tmp_path, tmp_path)
    assert (Path(base.text).name, Path(base.calibrations["in-domain"]).name) == ("wiki.test.raw", "wiki.valid.raw")
    with pytest.raises(InputError, match="choose demo or smollm2"):
        find_base("llama", tmp_path, None)
