"""A GGUF file in llama.cpp and here, on the same text: `python -m quantkit.eval.interop.llama_cpp PROGRAMS FILE`.

llama-perplexity cuts a text into windows and scores the second half of each; our side does the same in three ways:

    rounded  decoded weights in float32, activations rounded as llama.cpp rounds them (`llama_rounding.py`): a file that
             both read alike has one perplexity
    decoded  the same with exact activations: what the file means
    engine   our CPU kernels in bfloat16: what is served

Rows go to `eval/results/gguf.csv`, with what llama.cpp warned of.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.bundled import HELDOUT_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_losses
from quantkit.errors import QuantkitError
from quantkit.eval.engine import csv_file
from quantkit.eval.interop.llama_rounding import round_inputs
from quantkit.eval.interop.rows import machine
from quantkit.eval.quality.predictors import Predictor, ReferencePredictor, load_predictor
from quantkit.gguf_import.reader import open_gguf
from quantkit.gguf_import.weights import tensor_types
from quantkit.reference import load_reference, load_tokenizer
from quantkit.sources import model_folder

FILE = Path("eval") / "results" / "gguf.csv"
COLUMNS = (
    *("date", "machine", "engine", "file", "types", "text", "windows", "window"),
    *("perplexity_there", "perplexity_here", "difference_percent", "warnings", "command"),
    *("perplexity_engine", "engine_difference_percent", "perplexity_rounded", "rounded_difference_percent"),
)
_FINAL = re.compile(r"Final estimate: PPL = ([\d.]+|nan|inf)")
_TRIES = 8  # it may end before its log, which another thread writes, is out


@dataclass(frozen=True)
class Windows:
    """How many windows of a text are scored, and how long each is."""

    text: Path
    count: int
    length: int


def perplexity_there(programs: Path, file: Path, windows: Windows) -> tuple[float, list[str]]:
    """By llama-perplexity, and the lines in which it warned."""
    words = [str(programs / "llama-perplexity"), "-m", str(file), "-f", str(windows.text), "--no-warmup"]
    sizes = ["-c", windows.length, "-b", windows.length, "-ub", windows.length, "--chunks", windows.count, "-t", 2]
    for _ in range(_TRIES):
        run = subprocess.run([*words, *map(str, sizes)], capture_output=True, text=True, check=False)
        said = run.stdout + run.stderr
        final = _FINAL.search(said)
        if final is not None:
            break
    if final is None:
        last = said.strip().splitlines()[-1]
        raise QuantkitError(f"llama-perplexity gave no number for {file}, exit code {run.returncode}: {last}")
    return float(final[1]), [line.strip() for line in said.splitlines() if _is_warning(line)]


@dataclass(frozen=True)
class Here:
    """Perplexities of one file on our side."""

    rounded: float
    decoded: float
    engine: float


def perplexities_here(model: str | Path, windows: Windows) -> Here:
    """In the way of llama-perplexity."""
    tokenizer, folder = load_tokenizer(model), model_folder(model)
    ids = torch.tensor(tokenizer(windows.text.read_text(encoding="utf-8")).input_ids)
    chunks = ids[: windows.count * windows.length].unfold(0, windows.length, windows.length).clone()
    if int(tokenizer("a").input_ids[0]) == tokenizer.bos_token_id:
        chunks[:, 0] = tokenizer.bos_token_id
    engine = load_predictor(folder, "runtime", window=windows.length, dtype="bfloat16", device="cpu")
    model_there = load_reference(folder, dtype="float32", activations="exact")
    reference = ReferencePredictor(model_there, folder)
    decoded = _perplexity(reference, chunks)
    round_inputs(model_there, Checkpoint(folder))
    return Here(_perplexity(reference, chunks), decoded, _perplexity(engine, chunks))


def measure(programs: Path, file: Path, windows: Windows) -> dict[str, Any]:
    """One row."""
    there, warned = perplexity_there(programs, file, windows)
    here = perplexities_here(file, windows)
    types = ", ".join(f"{count} x {name}" for name, count in tensor_types(open_gguf(file)).items())
    command = f"python -m quantkit.eval.interop.llama_cpp PROGRAMS {file.name}"
    command += f" --text {windows.text.name} --windows {windows.count} --window {windows.length}"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "engine": _version(programs),
        "file": file.name,
        "types": types,
        "text": windows.text.name,
        "windows": windows.count,
        "window": windows.length,
        "perplexity_there": round(there, 4),
        "perplexity_here": round(here.decoded, 4),
        "difference_percent": _percent(there, here.decoded),
        "warnings": " | ".join(warned),
        "command": command,
        "perplexity_engine": round(here.engine, 4),
        "engine_difference_percent": _percent(there, here.engine),
        "perplexity_rounded": round(here.rounded, 4),
        "rounded_difference_percent": _percent(there, here.rounded),
    }


def _percent(there: float, here: float) -> float:
    return round(100 * (there / here - 1), 3)


def _perplexity(predictor: Predictor, chunks: Tensor) -> float:
    half = chunks.shape[1] // 2
    losses = [token_losses(predictor.logits(ids)[half:].float(), ids[half + 1 :]) for ids in chunks]
    return math.exp(float(torch.cat(losses).double().mean()))


def _is_warning(line: str) -> bool:
    return "warn" in line.lower() and "warmup" not in line.lower()


def _version(programs: Path) -> str:
    run = subprocess.run([str(programs / "llama-perplexity"), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: (.+)", run.stdout + run.stderr)
    return f"llama.cpp {found[1]}" if found else "llama.cpp"


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of GGUF files in llama.cpp and here.")
    parser.add_argument("programs", type=Path, help="folder with llama-perplexity")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, default=HELDOUT_TEXT)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--write", action="store_true", help=f"append rows to {FILE}")
    asked = parser.parse_args()
    for file in asked.files:
        row = measure(asked.programs, file, Windows(asked.text, asked.windows, asked.window))
        print(
            row["file"],
            row["perplexity_there"],
            f"rounded {row['perplexity_rounded']}: {row['rounded_difference_percent']} %,",
            f"decoded {row['perplexity_here']}: {row['difference_percent']} %,",
            f"engine {row['perplexity_engine']}: {row['engine_difference_percent']} %",
            row["warnings"],
        )
        if asked.write:
            csv_file.append(FILE, COLUMNS, row)


if __name__ == "__main__":
    main()
