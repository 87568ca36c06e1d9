"""Numbers that pages call measured are those of rows in eval/results; ceilings beside them are computed again."""

import csv
import re
from collections.abc import Iterator
from functools import cache

import pytest

from pages import PAGES, ROOT
from quantkit.eval.kernels.cases import FORMATS
from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.plan.model import Decoder, PlannedModel, read_model
from quantkit.eval.plan.roofline import Ceiling
from quantkit.eval.plan.source import find_config
from quantkit.eval.plan.weights import in_format, unquantized
from quantkit.eval.shapes import SHAPES

NAMES = {"W4 g128": "w4", "NF4, double quantization": "nf4", "LLM.int8": "llm-int8", "bf16": "bf16"}
LOADS = ((1, 128), (8, 128), (32, 128), (256, 512))  # requests, tokens of a prompt; 256 new ones
NEW = 256
_START = re.compile(r"process(?: start)? to the first token.*?(\d\.\d) to (\d\.\d) s.*?(\d\.\d) to (\d\.\d)")


@cache
def rows() -> list[dict[str, str]]:
    with (ROOT / "eval" / "results" / "engine.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def speeds(weights: str, batch: int, prompt: int) -> set[str]:
    """Of all rows of that load on an H200, as the pages round them."""
    asked = ("llama-3.1-8b", weights, str(batch), str(prompt), str(NEW), "bfloat16", "NVIDIA H200")
    keys = ("model", "format", "batch", "prompt", "new", "kv_dtype", "gpu")
    return {f"{float(row['tokens_per_second']):,.0f}" for row in rows() if tuple(row[key] for key in keys) == asked}


def table_rows(page: str, names: Iterator[str]) -> dict[str, list[str]]:
    """Cells of the rows with these names."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGES[page].splitlines()]
    wanted = set(names)
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 5 and cells[0] in wanted}


@cache
def model() -> PlannedModel:
    return read_model(*find_config("llama-3.1-8b"))


def ceiling(weights: str) -> Ceiling:
    decoder = model().decoder
    assert isinstance(decoder, Decoder)
    planned = unquantized(decoder) if weights == "bf16" else in_format(model(), weights, FORMATS[weights]("bfloat16"))
    return Ceiling(model().cache, decoder.attention_width, planned, GPUS["h200"])


@pytest.mark.parametrize("page", ["README.md", "docs/explanations/engine.md"])
def test_speeds_are_those_of_rows(page: str) -> None:
    found = table_rows(page, iter(NAMES))
    assert set(found) == set(NAMES)
    for name, cells in found.items():
        for (batch, prompt), cell in zip(LOADS, cells, strict=True):
            assert cell in speeds(NAMES[name], batch, prompt), (name, batch)


def test_speeds_of_experts_are_those_of_rows() -> None:
    """Cells say tokens per second and the percent of what memory allows."""
    found = re.findall(r"^\| ([\w.-]+), ([\w-]+) \|(.+)\|$", PAGES["docs/performance/index.md"], re.MULTILINE)
    lines = [line for line in found if line[0] in SHAPES]
    assert {shape for shape, _, _ in lines} == {"qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"}
    for shape, weights, cells in lines:
        same = [row for row in rows() if (row["model"], row["format"]) == (shape, weights)]
        for (batch, prompt), cell in zip(LOADS, cells.split("|"), strict=True):
            load = [row for row in same if (row["batch"], row["prompt"]) == (str(batch), str(prompt))]
            said = {f"{float(row['tokens_per_second']):,.0f} ({float(row['percent_of_limit']):.0f} %)" for row in load}
            assert cell.strip() in (said or {""}), (shape, weights, batch)


def test_speeds_on_a_cpu_are_those_of_rows() -> None:
    """A table for each model that has rows; a cell is a row of its load, ours or llama.cpp's as its line says."""
    with (ROOT / "eval" / "results" / "cpu.csv").open(encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    page = PAGES["docs/performance/index.md"]
    tables = re.findall(
        r"^\| ([^|]+) \| 1 request \| prompt of 128 \| 8 requests \|\n.*\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    arm, x86 = "CPU, aarch64", "CPU, x86_64"
    models = {
        "Qwen2.5-1.5B's shape": ("qwen2.5-1.5b", arm),
        "SmolLM2-135M": ("smollm2-135m", arm),
        "`demo`": ("demo", arm),
        "Qwen2.5-1.5B's shape, x86": ("qwen2.5-1.5b", x86),
        "Qwen2.5-1.5B's shape, AVX-512": ("qwen2.5-1.5b", x86),
        "SmolLM2-135M, AVX-512": ("smollm2", x86),
        "`demo`, AVX-512": ("demo", x86),
        "`demo`, AVX-512, float32": ("demo", x86),
    }
    in_tables = dict.fromkeys(models[name] for name, _ in tables)
    assert list(in_tables) == list(dict.fromkeys((row["model"], row["machine"]) for row in measured))
    for name, lines in tables:
        for line in lines.splitlines():
            label, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
            engine = "llama.cpp" if label.endswith("llama-bench") else "quantkit"
            for load, cell in zip(("1 request", "prompt 128", "8 requests"), cells, strict=True):
                asked = (*models[name], engine, load)
                columns = ("model", "machine", "engine", "load")
                same = [row for row in measured if tuple(row[column] for column in columns) == asked]
                speeds = [float(row["tokens_per_second"]) for row in same]
                said = {f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}" for speed in speeds}
                assert cell in (said or {""}), (label, load)


def test_the_plan_compares_the_same_speeds_with_their_ceilings() -> None:
    names = {f"{weights}, measured of ceiling": weights for weights in NAMES.values()}
    found = table_rows("docs/reference/plan.md", iter(names))
    engine = {NAMES[name]: cells for name, cells in table_rows("docs/explanations/engine.md", iter(NAMES)).items()}
    assert set(found) == set(names)
    for name, weights in names.items():
        bound = ceiling(weights)
        most = [f"{bound.answer_tokens_per_second(batch, prompt, NEW):,.0f}" for batch, prompt in LOADS]
        assert found[name] == [f"{one} of {limit}" for one, limit in zip(engine[weights], most, strict=True)]


def test_times_to_the_first_token_are_those_of_rows() -> None:
    """Both ranges begin and end with a row, on every page; rows do not say whether Python kept its bytecode."""
    alone = [row for row in rows() if (row["model"], row["format"], row["batch"]) == ("llama-3.1-8b", "w4", "1")]
    taken = {f"{float(row['process_to_first_token_s'] or 'nan'):.1f}" for row in alone}
    said = set()
    for page in ("README.md", "docs/performance/index.md", "docs/explanations/engine.md"):
        found = _START.search(" ".join(PAGES[page].split()))
        assert found is not None, page
        said.add(found.groups())
    assert len(said) == 1
    assert set().union(*said) <= taken


def test_the_cache_of_the_70b_model() -> None:
    planned = read_model(*find_config("llama-3.1-70b"))
    heads, kv_heads, numbers = 64, 8, planned.cache.per_token
    with_groups, without = (numbers * share * 2 * 4096 / 1e9 for share in (1, heads // kv_heads))
    assert (
        f"= {with_groups:.2f} GB; with keys and values for each of its 64 heads it would be {without:.2f} GB"
        in (PAGES["docs/reference/plan.md"])
    )
