"""The lines of a report that repeat it: parsed by the real commands, they mean what the row was measured with."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration import Calibration
from quantkit.calibration_mix import source_of
from quantkit.cli import cli
from quantkit.defaults import QUALITY_WINDOWS
from quantkit.eval.compare import run as compare_run
from quantkit.eval.compare.asked import LAYER_WINDOWS, Asked, Entry
from quantkit.eval.compare.engine_setup import engine_options
from quantkit.eval.compare.results import Comparison
from quantkit.eval.compare.run import compare, entries_of
from quantkit.eval.compare.shape import entry_format
from quantkit.eval.engine.shape_formats import shape_format
from quantkit.eval.kernels.cases import FORMATS
from quantkit.eval.report.write import write_report
from quantkit.recipe import list_recipes, load_recipe
from quantkit.runtime.core.options import EngineOptions

DEMO = Asked(
    model="demo-draft", text=str(HELDOUT_TEXT), windows=3, window=64, calibration_text=None, samples=8, seq_len=96,
    batches=(1, 4, 64), prompt=32, new=7, device="cpu", reference=True, seed=5,
)  # fmt: skip
Line = tuple[str, dict[str, Any]]  # the command, and what its options mean


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Entry], Comparison, str]]:
    """A comparison in which nothing was measured, and its report.md."""
    monkeypatch.setattr(compare_run, "_run_process", lambda job, on_part: "")

    def write(
        asked: Asked, recipes: tuple[str, ...], checkpoints: tuple[str, ...] = ()
    ) -> tuple[list[Entry], Comparison, str]:
        entries = entries_of(asked, recipes, checkpoints)
        comparison = compare(asked, entries, tmp_path / "out", "quantkit compare")
        text = (write_report(comparison, tmp_path / "out").parent / "report.md").read_text(encoding="utf-8")
        return entries, comparison, text

    return write


def parse(line: str) -> Line:
    """As click reads it: every option, defaults too. A word that no command knows is an error."""
    name, *words = shlex.split(line)
    assert name == "quantkit"
    command: click.Command = cli
    context, names = None, []
    while isinstance(command, click.Group):
        found, inner, words = command.resolve_command(click.Context(command), words)
        assert inner is not None
        names.append(str(found))
        command = inner
    context = command.make_context(names[-1], words)
    return " ".join(names), context.params


def lines_of(comparison: Comparison, text: str) -> Iterator[tuple[str, list[Line]]]:
    """Name and parsed lines of every format, as report.md has them, which are those of report.json too."""
    blocks = re.findall(r"^(\S+):\n\n```\n(.*?)\n```$", text.partition("Each format by hand")[2], re.S | re.M)
    assert [name for name, _ in blocks] == [found.name for found in comparison.formats]
    for (name, block), found in zip(blocks, comparison.formats, strict=True):
        assert tuple(block.splitlines()) == found.commands
        yield name, [parse(line) for line in found.commands]


def check_speed(asked: Asked, lines: list[Line]) -> None:
    """All loads, on the engine of the comparison."""
    loads = []
    expected = engine_options(asked)
    for command, given in lines:
        assert command == "bench engine"
        loads += [(int(size), given["prompt_len"], given["new_tokens"]) for size in given["batch"].split(",")]
        assert (given["seed"], given["no_save"], given["zero_weights"]) == (asked.seed, True, False)
        names = EngineOptions.__dataclass_fields__.keys() - {"seed"}  # an engine's own is about sampling
        assert EngineOptions(**{name: value for name, value in given.items() if name in names}) == expected
    assert loads == [(load.batch, load.prompt, load.new) for load in asked.loads]


def check_quality(asked: Asked, entry: Entry, folder: str, line: Line, windows: int, backend: str | None) -> None:
    command, given = line
    assert command == "eval"
    based = entry.kind != "baseline"
    expected = {
        "model": folder,
        "text": None if asked.text == str(HELDOUT_TEXT) else asked.text,
        "window": asked.window,
        "max_windows": windows,
        "base": asked.model if based else None,
        "kl_windows": windows if based else None,
        "backend": backend,
        "layers": backend is None,
        "device": asked.device,
        "seed": asked.seed,
        "dtype": None,
        "head_bits": None,
        "step_tokens": None,
        "exact_activations": False,
    }
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(
    "asked",
    [
        DEMO,
        replace(DEMO, text="mine.txt", calibration_text="mine.jsonl", windows=40, reference=False),
        replace(DEMO, calibration_text={"mine.jsonl": 0.125, "src": 2.0}),
    ],
)
def test_lines_of_checkpoints(
    asked: Asked, report: Callable[..., Any], tmp_path: Path, quantized_draft: Callable[..., Path]
) -> None:
    theirs = str(quantized_draft("nf4"))
    entries, comparison, text = report(asked, ("rtn-w3g128", "gptq-w4g128"), (theirs,))
    for entry, (name, lines) in zip(entries, lines_of(comparison, text), strict=True):
        folder = {"baseline": "demo-draft", "recipe": str(tmp_path / "out" / name), "checkpoint": theirs}[entry.kind]
        if entry.kind == "recipe":
            (command, given), *lines = lines
            assert command == "quantize"
            assert (given["model"], given["output"], given["overwrite"]) == ("demo-draft", folder, True)
            assert given["quality_windows"] == min(QUALITY_WINDOWS, asked.windows)
            assert (given["device"], given["changes"], given["target_bits"]) == ("cpu", (), None)
            recipe = load_recipe(given["recipe"])
            assert recipe == load_recipe(entry.source)
            chosen = {name: given[name] for name in ("samples", "seq_len", "seed")}
            made = Calibration.from_recipe(recipe.calibration, source=source_of(given["texts"]), **chosen)
            assert made == Calibration.from_recipe(
                recipe.calibration, source=asked.calibration_text, samples=asked.samples, seq_len=asked.seq_len,
                seed=asked.seed,
            )  # fmt: skip
        for backend in ("runtime", "reference") if asked.reference else ("runtime",):
            check_quality(asked, entry, folder, lines.pop(0), asked.windows, backend)
        if entry.kind != "baseline":
            check_quality(asked, entry, folder, lines.pop(0), LAYER_WINDOWS, None)
        assert {(given["model"], given["shape"], given["formats"]) for _, given in lines} == {(folder, None, ())}
        check_speed(asked, lines)


def test_lines_of_a_shape(report: Callable[..., Any], tmp_path: Path) -> None:
    """Each names its format: bench engine measures four others without one."""
    (tmp_path / "mine.yaml").write_text("summary: mine\nmethod: rtn\nformat: {name: gptq, bits: 8, group_size: 32}\n")
    asked = replace(DEMO, model="tiny")
    entries, comparison, text = report(asked, ("gptq-w4g128", "awq-w4g128", "nf4", str(tmp_path / "mine.yaml")))
    for entry, (_, lines) in zip(entries, lines_of(comparison, text), strict=True):
        for _, given in lines:
            assert (given["model"], given["shape"]) == (None, "tiny")
            (name,) = given["formats"]
            assert shape_format("tiny", name, "float32") == entry_format("tiny", entry, "float32")
        check_speed(asked, lines)


def test_a_format_and_a_recipe_of_one_name_are_the_same() -> None:
    both = [recipe.name for recipe in list_recipes() if recipe.name in FORMATS]
    assert {"nf4", "llm-int8", "fp8"} <= set(both)
    for name in both:
        for dtype in ("bfloat16", "float16"):
            assert FORMATS[name](dtype) == entry_format("tiny", Entry(name, "recipe", name), dtype)


def test_a_line_of_a_shape_measures_its_format(report: Callable[..., Any], run_cli: Callable[..., Any]) -> None:
    asked = replace(DEMO, model="tiny", batches=(1,), new=2)
    _, comparison, _ = report(asked, ("gptq-w4g128",))
    (line,) = comparison.formats[1].commands
    code, out, err = run_cli(*shlex.split(line)[1:], "--json")
    assert (code, err) == (0, "")
    assert [row["format"] for row in json.loads(out)["rows"]] == ["gptq-w4g128"]
