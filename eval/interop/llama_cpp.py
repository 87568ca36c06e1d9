"""A GGUF file in llama.cpp and here, on the same text: `python -m quantkit.eval.interop.llama_cpp PROGRAMS FILE`.

llama-perplexity cuts a text into windows and scores the second half of each; our side decodes the file's weights and
does the same in float32. Rows go to `eval/results/gguf.csv`, with what llama.cpp warned of.
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
from quantkit.divergence import token_losses
from quantkit.errors import QuantkitError
from quantkit.eval.engine import csv_file
from quantkit.eval.interop.rows import machine
from quantkit.gguf_import.reader import open_gguf
from quantkit.gguf_import.weights import tensor_types
from quantkit.reference import load_reference, load_tokenizer

FILE = Path("eval") / "results" / "gguf.csv"
COLUMNS = (
    *("date", "machine", "engine", "file", "types", "text", "windows", "window"),
    *("perplexity_there", "perplexity_here", "difference_percent", "warnings", "command"),
)
_FINAL = re.compile(r"Final estimate: PPL = ([\d.]+|nan|inf)")
_TRIES = 3  # it may end before its log, which another thread writes, is out


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


def perplexity_here(model: str | Path, windows: Windows) -> float:
    """By decoded weights in float32, in the way of llama-perplexity."""
    tokenizer = load_tokenizer(model)
    ids = torch.tensor(tokenizer(windows.text.read_text(encoding="utf-8")).input_ids)
    chunks = ids[: windows.count * windows.length].unfold(0, windows.length, windows.length).clone()
    if int(tokenizer("a").input_ids[0]) == tokenizer.bos_token_id:
        chunks[:, 0] = tokenizer.bos_token_id
    reference = load_reference(model, dtype="float32")
    half = windows.length // 2
    with torch.no_grad():
        losses = [_losses(reference, chunk, half) for chunk in chunks]
    return math.exp(float(torch.cat(losses).double().mean()))


def measure(programs: Path, file: Path, windows: Windows) -> dict[str, Any]:
    """One row."""
    there, warned = perplexity_there(programs, file, windows)
    here = perplexity_here(file, windows)
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
        "perplexity_here": round(here, 4),
        "difference_percent": round(100 * (there / here - 1), 3),
        "warnings": " | ".join(warned),
        "command": command,
    }


def _losses(reference: Any, ids: Tensor, half: int) -> Tensor:
    logits = reference(ids[None]).logits[0]
    return token_losses(logits[half:-1], ids[half + 1 :])


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
            row["perplexity_here"],
            f"{row['difference_percent']} %",
            row["warnings"],
        )
        if asked.write:
            csv_file.append(FILE, COLUMNS, row)


if __name__ == "__main__":
    main()
