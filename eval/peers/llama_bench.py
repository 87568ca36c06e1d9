"""Ours and llama.cpp on a CPU, in turns, in one run.

    python -m quantkit.eval.peers.llama_bench PROGRAMS --model qwen2.5-1.5b \
        --ours shape:qwen2.5-1.5b:w4+head8 --ours shape:qwen2.5-1.5b:bf16 --theirs qwen-q4_k_m.gguf
    python -m quantkit.eval.peers.llama_bench PROGRAMS --model smollm2 --ours smollm2-w4 --ours smollm2-q4_k_m.gguf \
        --theirs smollm2-q4_k_m.gguf

PROGRAMS is the folder of `llama-bench`. `--ours` is a checkpoint, a GGUF file or `shape:NAME:FORMAT` with random
weights, and `+head8` behind it rounds the output layer to 8 bits; `--theirs` is a GGUF file. Three loads: one request
that answers (llama-bench's tg), prompts (pp), eight requests that answer (ours alone). In every round each contender
runs each load once, so what else a machine does is the same for all; of the rounds the fastest counts, beside it tokens
per second of processor time, which says more on a busy machine. Engines stay in memory all the time. Rows go to
eval/results/cpu.csv.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from quantkit.errors import InputError, QuantkitError
from quantkit.eval.engine import csv_file
from quantkit.eval.engine.run import Load, run_load
from quantkit.eval.engine.shape_formats import shape_format
from quantkit.eval.engine.start import parse_shape, start_shape
from quantkit.eval.interop.adapters import version_of
from quantkit.eval.interop.rows import machine
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.startup import start_engine

FILE = Path("eval") / "results" / "cpu.csv"
COLUMNS = (
    *("date", "machine", "threads", "engine", "version", "model", "format", "load", "new"),
    *("tokens_per_second", "tokens_per_cpu_second", "rounds", "command"),
)
PROMPT, TOGETHER, SHORT = 128, 8, 4
HEAD = "+head"
ANSWER, READ, EIGHT = "1 request", f"prompt {PROMPT}", f"{TOGETHER} requests"


@dataclass
class Speed:
    """Of one contender and load: tokens per second and per second of processor time, a number for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, tokens: int, wall: float, cpu: float) -> None:
        self.wall.append(tokens / max(wall, 1e-9))
        self.cpu.append(tokens / max(cpu, 1e-9))


class Contender(Protocol):
    name: str
    engine: str
    version: str
    loads: tuple[str, ...]

    def run(self, load: str, speed: Speed) -> None: ...


class Ours:
    """An engine in this process. What an answer takes is what many tokens take more than a few."""

    engine = "quantkit"
    loads: tuple[str, ...] = (ANSWER, READ, EIGHT)

    def __init__(self, source: str, options: EngineOptions, new: int) -> None:
        self.name, self.version, self._new = source, version_of("quantkit") or "checkout", new
        plain, _, bits = source.partition(HEAD)
        self._engine = _start(plain, replace(options, head_bits=int(bits) if bits else None))
        for load in (Load(1, PROMPT, 2), Load(TOGETHER, SHORT, 8), Load(1, SHORT, 8)):
            self._times(load)

    def run(self, load: str, speed: Speed) -> None:
        if load == READ:
            speed.add(PROMPT, *self._times(Load(1, PROMPT, 1)))
            return
        requests = 1 if load == ANSWER else TOGETHER
        few, many = (self._times(Load(requests, SHORT, new)) for new in (2, 2 + self._new))
        speed.add(requests * self._new, many[0] - few[0], many[1] - few[1])

    def _times(self, load: Load) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        run_load(self._engine, load, seed=time.monotonic_ns())
        return time.perf_counter() - wall, time.process_time() - cpu


def _start(source: str, options: EngineOptions) -> Engine:
    shape = parse_shape(source)
    if shape is None:
        return start_engine(source, options)
    fmt = shape_format(*shape, str(options.torch_dtype("bfloat16"))[6:])
    return start_shape(shape[0], fmt, options, first=False)[0]


class Theirs:
    """`llama-bench`, a process for each run. What it takes to load a file is taken off by a run with one repeat."""

    engine = "llama.cpp"
    loads: tuple[str, ...] = (ANSWER, READ)

    def __init__(self, programs: Path, file: str, threads: int, new: int) -> None:
        self.name, self._new = file, new
        self._words = [str(programs / "llama-bench"), "-m", file, "-t", str(threads), "-o", "json"]
        self.version = ""

    def run(self, load: str, speed: Speed) -> None:
        prompt, new = (PROMPT, 0) if load == READ else (0, self._new)
        (_, once), (rate, often) = (self._repeat(prompt, new, repeats) for repeats in (1, 3))
        speed.add(1, 1 / rate, (often - once) / (2 * (prompt + new)))

    def _repeat(self, prompt: int, new: int, repeats: int) -> tuple[float, float]:
        """The fastest tokens per second, and seconds of processor time of the whole process."""
        before = _children()
        words = [*self._words, "-p", str(prompt), "-n", str(new), "-r", str(repeats)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise QuantkitError(f"llama-bench failed with {self.name}: {ended.stderr.strip().splitlines()[-1]}")
        (found,) = json.loads(ended.stdout)
        self.version = f"build {found['build_number']} {found['build_commit']}"
        return max(found["samples_ts"]), _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(contenders: Sequence[Contender], rounds: int) -> dict[tuple[str, str, str], Speed]:
    """By engine, contender and load, in turns."""
    speeds: dict[tuple[str, str, str], Speed] = {}
    for _ in range(rounds):
        for contender in contenders:
            for load in contender.loads:
                speed = speeds.setdefault((contender.engine, contender.name, load), Speed())
                contender.run(load, speed)
    return speeds


def rows(contenders: Sequence[Contender], speeds: dict[tuple[str, str, str], Speed], about: dict[str, Any]) -> Any:
    for contender in contenders:
        for load in contender.loads:
            speed = speeds[contender.engine, contender.name, load]
            yield about | {
                "engine": contender.engine,
                "version": contender.version,
                "format": Path(contender.name).name,
                "load": load,
                "tokens_per_second": f"{max(speed.wall):.4g}",
                "tokens_per_cpu_second": f"{max(speed.cpu):.4g}",
                "rounds": len(speed.wall),
            }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m quantkit.eval.peers.llama_bench", description=__doc__)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--model", required=True, help="its name in the rows")
    parser.add_argument("--ours", action="append", default=[])
    parser.add_argument("--theirs", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--output", type=Path, default=FILE)
    asked = parser.parse_args(words)
    if asked.theirs and not (asked.programs / "llama-bench").is_file():
        raise InputError(f"{asked.programs} has no llama-bench; build llama.cpp and name the folder of its programs")
    torch.set_num_threads(asked.threads)
    options = EngineOptions(device="cpu", dtype=asked.dtype, max_context=512, kv_tokens=4096)
    contenders: list[Contender] = [Ours(source, options, asked.new) for source in asked.ours]
    contenders += [Theirs(asked.programs, file, asked.threads, asked.new) for file in asked.theirs]
    command = shlex.join(["python", "-m", "quantkit.eval.peers.llama_bench", *_without_folders(words or sys.argv[1:])])
    about = {"date": datetime.date.today().isoformat(), "machine": machine(), "threads": asked.threads}
    about |= {"model": asked.model, "new": asked.new, "command": command}
    for row in rows(contenders, measure(contenders, asked.rounds), about):
        csv_file.append(asked.output, COLUMNS, row)
        print(f"{row['engine']:10} {row['format']:32} {row['load']:12} "
              f"{row['tokens_per_second']:>8} tokens/s {row['tokens_per_cpu_second']:>8} per CPU second")  # fmt: skip


def _without_folders(words: Sequence[str]) -> list[str]:
    return [Path(word).name if "/" in word else word for word in words]


if __name__ == "__main__":
    main()
