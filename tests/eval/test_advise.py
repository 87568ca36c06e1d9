"""quantkit advise: what is chosen, on what it rests, commands that parse, refusals with the nearest that fits."""

import csv
import json
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click
import pytest

from gguf_files import gguf_pair
from quantkit.cli import cli
from quantkit.errors import InputError
from quantkit.eval.advice.advice import GOALS, Goal
from quantkit.eval.advice.advise import Decision, advice_of, decide, pays_from
from quantkit.eval.advice.options import AS_IT_IS, MOST_LOSS, Asked, Subject, options, read_subject
from quantkit.eval.advice.quality import RESULTS, known_losses
from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.shapes import SHAPES

Cli = Callable[..., tuple[int, str, str]]


def decided(model: str, goal: Goal, gpu: str = "h200", **asked: int) -> Decision:
    return decide(subject(model), Asked(goal, GPUS[gpu], **asked))


@cache
def subject(model: str) -> Subject:
    """Read once: every question about it is another."""
    return read_subject(model)


def parse(line: str) -> None:
    """As the command line would, without running it."""
    command: click.Command = cli
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(click.Context(command), name)
        assert found is not None, line
        command = found
    command.make_context(line, words)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-8b", "h200"), ("demo", "l4"), ("demo-experts", "rtx4090")])
def test_the_choice_is_the_best_of_all_options(model: str, gpu: str, goal: Goal) -> None:
    found = decided(model, goal, gpu)
    assert not any(other.beats(found.best, goal) for other in options(found.subject, found.asked))
    advice = advice_of(found)
    assert [reason.topic for reason in advice.reasons] == ["format", "cache", "parallelism", "speculation", "batch"]
    assert all(reason.source.startswith(("plan: ", "recipe_quality.csv", "unquantized")) for reason in advice.reasons)
    for command in advice.commands:
        parse(command)
    assert sum(command.startswith("quantkit serve ") for command in advice.commands) == 1


def test_goals_differ() -> None:
    chosen = {goal: decided("llama-3.1-8b", goal).best for goal in GOALS}
    assert chosen["quality"].format == "bf16"
    assert chosen["latency"].replica.ceiling.weights.scheme.startswith("W4")
    assert chosen["throughput"].format == "fp8"
    assert chosen["throughput"].load.batch == 256
    least = min(options(subject("llama-3.1-8b"), Asked("memory", GPUS["h200"])), key=lambda one: one.bytes)
    assert chosen["memory"].bytes == least.bytes
    assert all(one.kl <= MOST_LOSS for one in chosen.values())


def test_memory_counts_weights_reserve_and_pages() -> None:
    best = decided("llama-3.1-8b", "memory", requests=3).best
    fit = best.replica.stage.fit
    assert best.bytes == fit.weights + fit.reserve + (3 * 48 + 1) * 16 * 131_072  # 768 tokens are 48 pages


def test_what_would_change_it_is_where_it_changes() -> None:
    found = decided("llama-3.1-70b", "quality", "h100", gpus=2)
    at = found.change.at
    assert at is not None
    assert at == found.best.replica.stage.fit.requests + 1
    assert decided("llama-3.1-70b", "quality", "h100", gpus=2, requests=at - 1).best.format == found.best.format
    assert decided("llama-3.1-70b", "quality", "h100", gpus=2, requests=at).best.format != found.best.format


def test_the_runner_up_wins_where_it_is_said_to() -> None:
    found = decided("llama-3.1-8b", "latency", requests=32)
    runner_up, at = found.runner_up, found.change.at
    assert runner_up is not None
    if at is not None:
        assert runner_up.at(at).beats(found.best.at(at), "latency")


def test_speculation_is_for_answers_that_wait() -> None:
    latency, throughput = decided("llama-3.1-8b", "latency"), decided("llama-3.1-8b", "throughput")
    assert any("--speculative ngram,k=4" in line for line in advice_of(latency).commands)
    assert not any("--speculative" in line for line in advice_of(throughput).commands)
    alone, many = (pays_from(found.best, found.asked) for found in (latency, throughput))
    assert alone is not None
    assert many is None or many > alone


def test_more_gpus_only_where_they_are_needed() -> None:
    small = decided("llama-3.1-8b", "throughput", gpus=8)
    assert small.best.gpus == 1
    large = decided("llama-3.1-70b", "quality", "h100", gpus=4)
    assert large.best.gpus > 1
    assert any(f"--tensor-parallel {large.best.gpus}" in line for line in advice_of(large).commands)
    experts = decided("qwen3-30b-a3b", "quality", "l4", gpus=8)
    assert any("--expert-parallel" in line for line in advice_of(experts).commands)


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    with pytest.raises(InputError, match=r"does not fit on one L4 .* what does: --gpus \d, as .*; --gpu [\w-]+, as"):
        decided("llama-3.1-70b", "latency", "l4")
    with pytest.raises(InputError, match=r"--requests \d+, as ") as refused:
        decided("llama-3.1-8b", "memory", "l4", requests=256, prompt=4000)
    most = int(str(refused.value).split("--requests ")[1].split(",")[0])
    assert decided("llama-3.1-8b", "memory", "l4", requests=most, prompt=4000).best.load.batch == most
    with pytest.raises(InputError, match="tokens together, but demo takes"):
        decided("demo", "latency", prompt=1 << 20)


def test_a_folder_of_a_config_alone(tmp_path: Path, run_cli: Cli) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["llama-3.2-1b"]), encoding="utf-8")
    code, out, err = run_cli("advise", folder, "--gpu", "l4", "--goal", "latency")
    assert (code, err) == (0, "")
    assert "has no weights here" in out
    (folder / "config.json").write_text(
        json.dumps(SHAPES["llama-3.2-1b"] | {"quantization_config": {"quant_method": "gptq"}}), encoding="utf-8"
    )
    code, _, err = run_cli("advise", folder, "--gpu", "l4", "--goal", "latency")
    assert code == 2
    assert "quantized already (gptq), but its weights are not here" in err


def test_what_is_quantized_stays_as_it_is(quantized_draft: Callable[..., Path]) -> None:
    folder = quantized_draft("nf4")
    found = decided(str(folder), "throughput", "l4")
    assert found.best.format == AS_IT_IS
    assert found.best.replica.ceiling.weights.scheme == "NF4 b64 double-quant"
    assert not any(line.startswith("quantkit quantize") for line in advice_of(found).commands)


def test_a_gguf_file_is_served_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    file = gguf_pair("llama", tmp_path)[0]
    assert file.suffix == ".gguf"
    found = decided(str(file), "memory", "l4", prompt=16, new=8)
    assert found.best.format == AS_IT_IS
    assert any(str(file) in line for line in advice_of(found).commands)


def test_json_has_the_numbers(run_cli: Cli) -> None:
    code, out, err = run_cli("advise", "llama-3.1-8b", "--gpu", "H200", "--goal", "throughput", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["chosen"]["format"] == found["format"]
    assert found["chosen"]["tokens_per_second_per_gpu"] >= found["next"]["tokens_per_second_per_gpu"]
    assert found["change"]["runner_up"] == found["next"]["format"]
    assert any("engine.csv" in reason["source"] for reason in found["reasons"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--goal latency --gpu h300", "unknown GPU 'h300'"),
        ("--goal latency --gpu l4 --requests 0", "--requests is 0, but must be 1 or more"),
        ("--goal cheap --gpu l4", "'cheap' is not one of"),
    ],
)
def test_wrong_input_is_one_line(run_cli: Cli, options: str, message: str) -> None:
    code, out, err = run_cli("advise", "demo", *options.split())
    assert (code, out) == (2, "")
    assert message in err


def test_losses_are_those_of_the_comparison() -> None:
    """The file is made of the report that it names, and travels with the package."""
    root = Path(__file__).parents[2]
    report = json.loads((root / "eval/results/compare/smollm2-135m/report.json").read_text(encoding="utf-8"))
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = {row["recipe"]: row for row in csv.DictReader(file)}
    assert set(rows) == {one["name"] for one in report["formats"]}
    for one in report["formats"]:
        assert float(rows[one["name"]]["kl"]) == pytest.approx(one["quality"]["kl"]["value"], abs=1e-5)
    assert set(known_losses()) == set(rows)
    assert known_losses(Path("nowhere.csv")) == {}
    assert '"recipe_quality.csv"' in (root / "pyproject.toml").read_text(encoding="utf-8")
