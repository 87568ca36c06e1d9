"""What `quantkit bench engine` measured: the rows of eval/results/engine.csv, which travel with the package.

Of every load the newest row counts; rows with guesses (speculation) do not, nor variants that no recipe writes.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quantkit.errors import InputError
from quantkit.eval.engine.shape_formats import shape_format
from quantkit.eval.plan.gpus import GPUS, Gpu
from quantkit.eval.plan.model import PlannedModel, read_model
from quantkit.eval.plan.roofline import Ceiling
from quantkit.eval.plan.weights import UNQUANTIZED, WeightPlan, in_format, unquantized
from quantkit.eval.shapes import SHAPES
from quantkit.runtime.model.config import read_model_config

RESULTS = Path(__file__).parents[1] / "results" / "engine.csv"
_KV_NAMES = {"float8_e4m3fn": "fp8", "int8": "int8", "int4": "int4"}
_AUTO = "auto"  # a cache in 16 bits


@dataclass(frozen=True)
class Case:
    """One load of one model in one format on one GPU: so many requests at the same moment."""

    gpu: str  # by its name in GPUS
    model: str  # a shape
    format: str  # as the row has it: a format of `quantkit bench`, or a recipe
    kv_dtype: str
    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Row:
    """What was measured of a case. Times in seconds."""

    case: Case
    date: str
    tokens_per_second: float  # of answers, their prompts computed in the same time
    prompts: float  # until the last request has its first token
    step: float | None  # median, of steps in which everybody answered; None where there was none

    @property
    def title(self) -> str:
        """As a reader finds it in the file."""
        case = self.case
        load = f"{case.batch} x ({case.prompt} + {case.new})"
        return f"engine.csv {self.date} {GPUS[case.gpu].title} {case.model} {case.format}, {load}"


def read_rows(path: Path = RESULTS) -> tuple[Row, ...]:
    """The newest of every case, by a GPU and a shape that are known; none where the file is missing."""
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for given in csv.DictReader(file) if (row := _row(given)) is not None]
    return tuple({row.case: row for row in sorted(rows, key=lambda row: row.date)}.values())


def _row(given: dict[str, str]) -> Row | None:
    gpu = next((gpu.name for gpu in GPUS.values() if given["gpu"] in gpu.reported), None)
    model = given["model"].split(" (")[0]  # `llama-3.1-8b (a folder of random weights)`
    if gpu is None or model not in SHAPES or given.get("speculative") or given.get("outliers"):
        return None
    fmt = UNQUANTIZED if given["format"] == "bfloat16" else given["format"]
    kv_dtype = _KV_NAMES.get(given["kv_dtype"], _AUTO)
    case = Case(gpu, model, fmt, kv_dtype, int(given["batch"]), int(given["prompt"]), int(given["new"]))
    step = float(given["step_ms"]) / 1e3
    prompts, speed = float(given["ttft_ms_max"]) / 1e3, float(given["tokens_per_second"])
    return Row(case, given["date"], speed, prompts, step or None)


@cache
def known_rows(*, routed: bool) -> tuple[Row, ...]:
    """Of today's file, those of models with or without experts whose format can be planned."""
    kind = [row for row in read_rows() if read_model_config(SHAPES[row.case.model]).has_experts == routed]
    return tuple(row for row in kind if planned(row.case.model, row.case.format) is not None)


@cache
def shape(name: str) -> PlannedModel:
    return read_model(name, SHAPES[name])


@cache
def planned(model: str, fmt: str) -> WeightPlan | None:
    """The weights of a measured model; None where the row has a name of its own for what it did to a format."""
    decoder = shape(model).decoder
    assert decoder is not None
    if fmt == UNQUANTIZED:
        return unquantized(decoder)
    try:
        made = shape_format(model, fmt, "bfloat16")
        return None if made is None else in_format(shape(model), fmt, made)
    except InputError:
        return None


def ceiling_of(case: Case, gpu: Gpu | None = None) -> Ceiling:
    """What bounds a case that can be planned."""
    from quantkit.eval.plan.question import Question

    model, weights = shape(case.model), planned(case.model, case.format)
    assert model.decoder is not None
    assert weights is not None
    itemsize = Question(kv_dtype=case.kv_dtype).itemsize(model.cache)
    decoder = model.decoder
    return Ceiling(model.cache, decoder.attention_width, weights, gpu or GPUS[case.gpu], itemsize, decoder.prompt_width)
