"""The command line as a user types it: human output, --json, quiet pipes, help."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.cli import COMMANDS

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(run_cli: Cli, name: str) -> None:
    code, out, _ = run_cli(name, "--help")
    assert code == 0
    assert f"Usage: quantkit {name}" in out
    assert name == "recipes" or f"quantkit {name}" in out.split("\n", 1)[1], "help shows an example"


def test_no_arguments_show_the_help(run_cli: Cli) -> None:
    assert run_cli() == run_cli("--help")


def test_version(run_cli: Cli) -> None:
    assert run_cli("--version")[1].startswith("quantkit 0.")


def test_quantize_inspect_convert(run_cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    code, out, err = run_cli("quantize", tiny_model, "-r", "rtn-w4g128", "-o", tmp_path / "w4")
    assert (code, err) == (0, "")
    assert "14 layers" in out
    assert "verified" in out
    code, out, _ = run_cli("inspect", tmp_path / "w4")
    assert code == 0
    for word in ("W4 g128 sym", "qweight", "layer 1", "lm_head", "vLLM", "yes"):
        assert word in out
    code, out, _ = run_cli("convert", tmp_path / "w4", "--to", "compressed-tensors", "-o", tmp_path / "ct")
    assert code == 0
    assert "unchanged" in out


def test_json_everywhere(run_cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    report = json.loads(run_cli("quantize", tiny_model, "-r", "nf4", "-o", tmp_path / "q", "--json")[1])
    assert report["recipe"] == "nf4"
    assert 4 < report["bits_per_weight"] < 4.5
    assert len(report["layers"]) == 14
    found = json.loads(run_cli("inspect", tmp_path / "q", "--json")[1])
    assert found["quant_method"] == "bitsandbytes"
    assert {verdict["engine"]: verdict["loads"] for verdict in found["engines"]}["transformers"]
    converted = run_cli("convert", tmp_path / "q", "--to", "nf4-plain", "-o", tmp_path / "p", "--json")[1]
    assert json.loads(converted)["layers"] == 14
    recipes = json.loads(run_cli("recipes", "--json")[1])
    assert {"nf4", "llm-int8", "rtn-w4g128"} <= {recipe["name"] for recipe in recipes}
    evaluated = json.loads(run_cli("eval", "demo-draft", "--max-windows", 1, "--window", 64, "--json")[1])
    assert evaluated["windows"] == 1


def test_recipes_lists_each_with_a_line(run_cli: Cli) -> None:
    from quantkit.recipe import list_recipes

    lines = run_cli("recipes")[1].splitlines()
    for recipe in list_recipes():
        assert any(recipe.name in line and recipe.summary in line for line in lines), recipe.name


def test_generate_prints_only_the_text(run_cli: Cli) -> None:
    code, out, err = run_cli("generate", "demo-draft", "The function returns", "--max-tokens", 12)
    assert (code, err) == (0, "")
    assert 10 < len(out.strip()) < 120
    again = run_cli("generate", "demo-draft", "The function returns", "--max-tokens", 12, "--json")[1]
    assert json.loads(again)["text"] == out.rstrip("\n")
    args = ("generate", "demo-draft", "A list", "--temperature", 1, "--max-tokens", 12)
    sampled = [run_cli(*args, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_chat_stops_at_the_end_of_the_turn(run_cli: Cli) -> None:
    code, out, _ = run_cli("generate", "demo-draft", "What is a list?", "--chat", "--max-tokens", 200)
    assert code == 0
    assert "<|" not in out


def test_generate_as_json(run_cli: Cli) -> None:
    args = ("generate", "demo", "The function returns", "--max-tokens", 5, "--temperature", 1, "-n", 2, "--logprobs", 1)
    found = json.loads(run_cli(*args, "--json")[1])
    assert [len(answer["token_ids"]) for answer in found["answers"]] == [5, 5]
    assert found["answers"][0]["token_ids"] != found["answers"][1]["token_ids"]
    assert [len(row) for row in found["answers"][0]["top_logprobs"]] == [1] * 5
    assert found["answers"][0]["finish_reason"] == "length"
    stopped = json.loads(run_cli("generate", "demo", "The function returns", "--stop", " bytes", "--json")[1])
    assert stopped["answers"][0]["stop_reason"] == " bytes"
    assert "bytes" not in stopped["text"]


def test_generate_says_how_good_guesses_were(run_cli: Cli) -> None:
    """The text is that of plain decoding; the line about guesses goes to stderr."""
    args = ("generate", "demo", "The function returns", "--max-tokens", 24)
    how = "draft=demo-draft,k=3,adaptive=off"
    plain = run_cli(*args)[1]
    code, out, err = run_cli(*args, "--speculative", how)
    assert (code, out) == (0, plain)
    found = re.fullmatch(r"speculation: 24 tokens in (\d+) steps, (\d+) % of guesses right\n", err)
    assert found, err
    assert int(found[1]) < 24
    counts = json.loads(run_cli(*args, "--speculative", how, "--json")[1])["speculation"]
    assert 0 < counts["accepted"] < counts["guessed"] <= 3 * counts["steps"]
    assert int(found[2]) == round(100 * counts["accepted"] / counts["guessed"])
    assert "speculation" not in json.loads(run_cli(*args, "--json")[1])
    one = run_cli("generate", "demo", "The", "--max-tokens", 1, "--speculative", "ngram")[2]
    assert one == "speculation: 1 tokens in 1 steps, nothing was guessed\n"


def test_chat_keeps_the_conversation(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns from standard input; a wrong command and an empty line change nothing."""
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?\n\n/wrong\nAnd a set?\n/reset\nWhat is a list?\n"))
    code, out, err = run_cli("chat", "demo", "--max-tokens", 12)
    assert code == 0
    assert "unknown command /wrong" in err
    first, second, third = (line for line in out.replace("> ", "").splitlines() if line)
    assert first == third  # after /reset
    assert first != second


def test_bench_engine(run_cli: Cli, tmp_path: Path) -> None:
    """Rows for two formats and two loads, in a table, in JSON and in a file."""
    args = ("bench", "engine", "--shape", "tiny", "--batch", "1,3", "--prompt-len", 8, "--new-tokens", 6)
    code, out, err = run_cli(*args, "--format", "w4,bf16", "--output", tmp_path / "rows.csv")
    assert (code, err) == (0, "")
    assert sum("8 + 6" in line and "held" not in line for line in out.splitlines()) == 4
    assert "from process start to first token" in out
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["format"], row["batch"]) for row in rows] == [("w4", "1"), ("w4", "3"), ("bf16", "1"), ("bf16", "3")]
    assert all(float(row["tokens_per_second"]) > 0 and float(row["step_ms"]) > 0 for row in rows)
    zeros = run_cli(*args, "--format", "w4", "--zero-weights", "--no-save", "--json")
    assert [row["format"] for row in json.loads(zeros[1])["rows"]] == ["w4, zeros", "w4, zeros"]
    found = json.loads(run_cli("bench", "engine", "demo-draft", *args[4:], "--no-save", "--json")[1])
    assert [row["format"] for row in found["rows"]] == ["float32", "float32"]
    assert set(found["rows"][0]["stages_s"]) >= {"weights", "cache"}


def test_module_entry_and_closed_pipe() -> None:
    run = subprocess.run([sys.executable, "-m", "quantkit", "recipes"], capture_output=True, text=True, check=True)
    assert "nf4" in run.stdout
    assert run.stderr == ""
