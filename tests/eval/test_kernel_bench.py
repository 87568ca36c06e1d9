"""`quantkit bench kernels` from end to end on small shapes. No test looks at how long anything took."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.eval.kernels import cases, run
from quantkit.eval.kernels.cases import LinearCase, make_cases
from quantkit.eval.kernels.contenders import Compute, Contender, Quantkit
from quantkit.eval.kernels.peers import PEERS
from quantkit.eval.kernels.problems import Problem
from quantkit.eval.kernels.results import COLUMNS, Report
from quantkit.eval.kernels.timing import CpuClock, Limits
from quantkit.kernels.reference.compare import FLOAT8_STEPS, ROUNDED_INPUTS

Cli = Callable[..., tuple[int, str, str]]
SMALL = ("bench", "kernels", "--device", "cpu", "--shape", "128x256", "--repeat", 2)


class Changed(Quantkit):
    """The right result, then something done to it; `from_call` counts the calls of one copy."""

    def __init__(self, change: Callable[[Tensor], Tensor], from_call: int = 0) -> None:
        self.change, self.from_call = change, from_call

    def prepare(self, problem: Problem) -> Compute:
        right, calls = super().prepare(problem), 0

        def compute() -> Tensor:
            nonlocal calls
            calls += 1
            return self.change(right().clone()) if calls > self.from_call else right()

        return compute


def poisoned(result: Tensor) -> Tensor:
    result[-1, 1] = float("nan")  # the compared outputs of a large layer are only some of them
    return result


def bench(ours: Contender, *peers: Contender, formats: str = "w4", shape: str = "128x256") -> Report:
    made = make_cases([formats], [shape], [3], "bfloat16", on_gpu=False)
    return run.Bench(CpuClock(2), peers, ours).run(made, Limits(1e12, 1e14), lambda row: None)


def test_every_format_is_checked_and_timed(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "PREFILL_ON_CPU", ((2, 8),))  # torch's attention in bfloat16 takes its time on a CPU
    code, out, err = run_cli(*SMALL, "--m", "1,3", "--format", "all", "--json", "--no-save")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["device"] == "cpu"
    assert report["notes"] == []
    assert report["limits"]["bandwidth_tb_s"] > 0
    linear = [row for row in report["rows"] if row["what"] == "linear"]
    assert [row["m"] for row in linear] == [1, 3] * 19
    assert {row["format"] for row in linear} >= {"w4", "awq", "w2", "nf4", "nvfp4", "llm-int8", "fp8-block", "bf16"}
    assert {row["layer"].split()[0] for row in report["rows"] if row["what"] == "attention"} == {"decode", "prefill"}
    for row in report["rows"]:
        assert not row["wrong"]
        assert row["error"] < (FLOAT8_STEPS if row["format"] == "w4a8" else ROUNDED_INPUTS)
        assert 0 < row["microseconds"]["p20"] <= row["microseconds"]["median"] <= row["microseconds"]["p80"]
        assert row["percent_of_limit"] > 0
        assert ("torch" in row["peers"]) == (not row["layer"].startswith("decode"))
    assert [row["format"] for row in linear if "tinygemm" in row["peers"]][::2] == [
        *("w4", "w4a8", "w4-g64", "w4-g32", "w4-asym", "awq"),
    ]


def test_the_table_and_the_file(run_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "kernels.csv"
    args = (*SMALL, "--m", 1, "--format", "nf4,attention", "--against", "torch", "--output", file, "--explain")
    quick = ("--dtype", "float16")  # torch's attention takes its time in bfloat16 on a CPU
    for rows in (4, 8):
        code, out, err = run_cli(*args, *quick)
        assert (code, err) == (0, "")
        for word in ("CPU (wall clock)", "% of limit", "vs torch", "kernel", "prefill 2x48", str(file)):
            assert word in out
        lines = file.read_text().splitlines()
        assert len(lines) == 1 + rows
    assert tuple(lines[0].split(",")) == COLUMNS
    found = list(csv.DictReader(lines))
    assert found[0]["format"] == "nf4"
    assert (found[0]["gpu"], found[0]["torch"]) == ("cpu", torch.__version__)
    assert (found[0]["m"], found[0]["shape"], found[0]["what"]) == ("1", "128x256", "linear")
    assert float(found[0]["torch_us"]) > 0
    assert found[0]["gemlite_us"] == ""


def test_where_rows_go(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout nowhere, inside to its results."""
    monkeypatch.chdir(tmp_path)
    args = (*SMALL, "--m", 1, "--format", "bf16")
    assert "appended" not in run_cli(*args)[1]
    assert not list(tmp_path.iterdir())
    (tmp_path / "pyproject.toml").touch()
    for folder in ("eval/results", "kernels/reference"):
        (tmp_path / folder).mkdir(parents=True)
    assert "appended" not in run_cli(*args, "--no-save")[1]
    assert "appended to eval/results/kernels.csv" in run_cli(*args)[1]
    assert len((tmp_path / "eval/results/kernels.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--format", "w4,nf5"), ("unknown format 'nf5'", "did you mean 'nf4'")),
        (("--shape", "llama-3.1-9b"), ("unknown shape", "did you mean 'llama-3.1-8b'", "OUTxIN")),
        (("--shape", "128x100"), ("format 'w4' does not take layer 128x100", "128")),
        (("--against", "torch,gemlight"), ("unknown peer 'gemlight'", "did you mean 'gemlite'")),
        (("--m", "1,two"), ("--m is '1,two'", "whole numbers")),
        (("--m", "0"), ("1 or more",)),
        (("--dtype", "float32"), ("bfloat16 or float16",)),
        (("--kv-dtype", "int3"), ("unknown kv-dtype 'int3'", "did you mean 'int8'")),
        (("--device", "tpu"), ("'tpu'", "auto, cpu, cuda or cuda:N")),
        (("--output", "missing/kernels.csv"), ("missing", "does not exist")),
        (("--output", "kernels.csv", "--no-save"), ("--output", "--no-save")),
    ],
)
def test_wrong_input(
    args: tuple[str, ...], words: tuple[str, ...], assert_refused: Callable[..., None], tmp_path: Path
) -> None:
    assert_refused(tmp_path, "bench", "kernels", *args, words=words)


def test_a_peer_that_is_asked_for_must_be_installed(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PEERS["gemlite"], "installed", lambda: False)
    code, _, err = run_cli(*SMALL, "--against", "gemlite", "--no-save")
    assert code == 2
    assert "pip install gemlite" in err


def test_a_file_with_other_columns_is_refused(tmp_path: Path, assert_refused: Callable[..., None]) -> None:
    file = tmp_path / "old.csv"
    file.write_text("date,gpu,median\n2026-01-01,cpu,1\n")
    assert_refused(tmp_path, *SMALL, "--output", file, words=("other columns", "median", "--output"))
    assert len(file.read_text().splitlines()) == 2


def test_a_wrong_kernel_has_no_time(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "OURS", Changed(lambda result: result * 1.02))
    args = (*SMALL, "--m", 1, "--format", "w4,attention", "--output", tmp_path / "out.csv")
    code, out, err = run_cli(*args)
    assert code == 1
    assert out.count("WRONG") == 4
    assert "4 of 4 results are wrong: w4 128x256 M=1, attention decode 1x128" in err
    assert not (tmp_path / "out.csv").exists()
    row = json.loads(run_cli(*args, "--json")[1])["rows"][0]
    assert row["wrong"]
    assert row["microseconds"] is row["percent_of_limit"] is None
    assert row["error"] == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    "ours",
    [
        Changed(poisoned),  # one element of many, in an output that is not compared
        Changed(lambda result: result[:, :-1]),
        Changed(lambda result: result + 1, from_call=2),  # such as a counter that nobody set back
    ],
    ids=["not written", "too small", "wrong later"],
)
def test_what_counts_as_wrong(ours: Contender) -> None:
    report = bench(ours, shape="1024x256")
    assert report.wrong == ["w4 1024x256 M=3"]
    assert report.rows[0].times is None
    assert bench(Quantkit(), shape="1024x256").wrong == []


def test_a_peer_that_fails_costs_nothing_else() -> None:
    class Failing(Quantkit):
        name = "gemlite"

        def prepare(self, problem: Problem) -> Compute:
            raise RuntimeError("no kernel image\nis available")

    class Strange(Changed):
        name = "bitsandbytes"

    report = bench(Quantkit(), Failing(), Strange(lambda result: -result), PEERS["torch"])
    assert list(report.rows[0].peers) == ["torch"]
    assert report.rows[0].ratio("gemlite") is None
    assert report.notes == (
        "gemlite at w4 128x256 M=3 failed: RuntimeError: no kernel image",
        "bitsandbytes at w4 128x256 M=3 is not compared: it gives other numbers, relative error 2",
    )


def test_percent_of_the_limit() -> None:
    limits = Limits(bandwidth=4e12, rate=8e14)
    few = LinearCase("w4", "qkv", 6144, 4096, 1, "bfloat16")
    assert few.bytes == pytest.approx(6144 * 4096 * (0.5 + 2 / 128) + 2 * (6144 + 4096), rel=1e-5)
    assert limits.seconds(few.bytes, few.operations)[1] == "memory"
    assert limits.percent(few.bytes, few.operations, 1, 6.5) == pytest.approx(50, rel=0.01)
    many = LinearCase("fp8", "qkv", 6144, 4096, 4096, "bfloat16")
    assert limits.seconds(many.bytes, many.operations, many.rate_factor)[1] == "compute"
    least = 2 * 6144 * 4096 * 4096 / 16e14 * 1e6
    assert limits.percent(many.bytes, many.operations, many.rate_factor, 4 * least) == pytest.approx(25)
    prefill, decode = (make_cases(["attention"], ["llama-3.1-8b"], [1], "bfloat16", on_gpu=True)[i] for i in (8, 0))
    assert prefill.operations == pytest.approx(4 * 128 * 32 * 8 * 1024**2 / 2, rel=1e-2)
    assert decode.bytes == pytest.approx(2 * 1024 * 8 * 128 * 2, rel=1e-2)


def test_attention_over_every_kind_of_cache(run_cli: Cli) -> None:
    kinds = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8", "int4": "int4"}
    code, out, _ = run_cli(
        "bench", "kernels", "--device", "cpu", "--format", "attention", "--kv-dtype", ",".join(kinds), "--repeat", 1,
        "--no-save", "--json",
    )  # fmt: skip
    rows = json.loads(out)["rows"]
    assert (code, [row["wrong"] for row in rows]) == (0, [False] * len(rows))
    moved = {row["format"]: row["bytes"] for row in rows if row["layer"] == "decode 1x128"}
    assert list(moved) == list(kinds.values())
    entries = 2 * 128 * 8  # of keys and of values: tokens and heads, with a word each where there are words
    saved = [(moved["bfloat16"] - count) / entries for count in moved.values()]
    assert saved == [0, 128, 128 - 4, 192 - 8]


def test_works_without_triton() -> None:
    """As on a laptop, where torch comes without it."""
    args = [str(arg) for arg in (*SMALL, "--m", 1, "--format", "w4,fp8,attention", "--no-save", "--explain")]
    args += ["--dtype", "float16"]  # in which torch's attention is quick on a CPU
    code = f"import sys; sys.modules['triton'] = None; from quantkit.cli import main; main({args})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attention" in done.stdout.lower()


@pytest.mark.gpu
def test_on_the_gpu(run_cli: Cli) -> None:
    args = ("bench", "kernels", "--shape", "1024x1024,384x640", "--m", "1,7,300", "--format", "all", "--repeat", 2)
    code, out, err = run_cli(*args, "--no-save", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["device"] == torch.cuda.get_device_name()
    assert all(row["peers"] for row in report["rows"] if row["what"] == "linear")


def test_tuning_needs_a_gpu(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run_cli("bench", "kernels", "--shape", "128x256", "--device", "cpu", "--tune", "--no-save")
    assert code == 2
    assert "--tune" in err
