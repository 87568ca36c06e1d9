"""Ours and vLLM side by side: the same folder, the same machine, the same token ids, one run.

    python -m quantkit.eval.peers.vllm_bench folders
    python -m quantkit.eval.peers.vllm_bench folders --formats w4 --loads 1x128+256,16x2048+1
    python -m quantkit.eval.peers.vllm_bench folders --formats w4 --serve --loads 8x128+256

Makes folders of the Llama-3.1-8B shape with random weights (bf16, and W4 in GPTQ's layout, AWQ, FP8 by plain rounding)
and gives each to both engines, every one in a process of its own. All requests are handed over at once, greedy, the end
token ignored, after two short warm-ups; the clock runs from then to the last token. With --serve the same goes over
HTTP. Rows go to eval/results/side_by_side.csv; given again on the same day, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.devices import on_device, resolve_device
from quantkit.errors import InputError, QuantkitError
from quantkit.eval.engine.run import (
    SHORT_PROMPT,
    WARM_UP_TOKENS,
    Load,
    random_prompts,
    seconds_since_process_start,
    warm_ups,
)
from quantkit.eval.interop import speed_rows
from quantkit.eval.interop.adapters import version_of
from quantkit.eval.interop.parent import end_with
from quantkit.eval.interop.speed_folders import FORMATS, check_formats, make_folders
from quantkit.eval.interop.speed_ours import measure_ours
from quantkit.eval.interop.speed_rows import LOADS, OFFLINE, OURS, SERVED, Timed, load_name, longest, parse_loads
from quantkit.eval.interop.speed_serve import measure_served
from quantkit.eval.peers.vllm_load import ENVIRONMENT, token_prompts
from quantkit.eval.shapes import PLAIN_SHAPES

ENGINES = (OURS, "vLLM")
_CONTEXT = 4096
_MEMORY_SHARE = 0.85
_LIMIT = 400.0  # seconds for one engine with one folder


@dataclass(frozen=True)
class Job:
    """One engine with one folder."""

    engine: str
    folder: Path
    format: str
    loads: tuple[Load, ...]
    device: str
    output: Path
    command: str  # of the whole run
    protocol: str

    def words(self) -> list[str]:
        """The arguments of the process that does it."""
        words = ["--engine", self.engine, "--format", self.format, "--device", self.device, "--command", self.command]
        words += ["--loads", ",".join(map(load_name, self.loads)), "--output", str(self.output)]
        words += ["--parent", str(os.getpid())]
        return [*words, str(self.folder)]

    def keep(self, timed: Timed) -> None:
        about = {"engine": self.engine, "version": engine_version(self.engine), "format": self.format}
        about |= {"model": _shape_of(self.folder, self.format), "protocol": self.protocol, "command": self.command}
        speed_rows.append(self.output, timed, **about)


def engine_version(engine: str) -> str:
    """Ours may run from a checkout that is not installed."""
    return version_of("vllm") if engine == "vLLM" else version_of("quantkit") or "checkout"


def _shape_of(folder: Path, format_name: str) -> str:
    return folder.name.removesuffix(f"-{format_name}")


def measure_vllm(folder: Path, loads: Sequence[Load]) -> Iterator[Timed]:
    """One engine for all loads, timed as `eval/engine/run.py` times ours."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    vocab = vocab_of(folder)
    llm = LLM(**bench_arguments(folder, loads))

    def seconds_of(load: Load, seed: int) -> float:
        prompts = token_prompts(random_prompts(load, vocab, seed))
        params = SamplingParams(**answer_arguments(load))
        begin = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - begin
        lengths = {len(answer.outputs[0].token_ids) for answer in answers}
        if lengths != {load.new}:
            raise QuantkitError(f"vLLM answered with {sorted(lengths)} tokens instead of {load.new}")
        return took

    seconds_of(Load(1, SHORT_PROMPT, WARM_UP_TOKENS), 0)
    start = seconds_since_process_start()
    for load in loads:
        for number, warm_up in enumerate(warm_ups(load), 1):
            seconds_of(warm_up, number)
        yield Timed.offline(load, seconds_of(load, 0), start)


def bench_arguments(folder: Path, loads: Sequence[Load]) -> dict[str, Any]:
    """Of `vllm.LLM`: graphs and compilation as it comes, but nothing remembered of prompts."""
    return {
        "model": str(folder.absolute()),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": max(_CONTEXT, longest(loads)),
        "max_num_seqs": max(load.batch for load in loads),
        "gpu_memory_utilization": _MEMORY_SHARE,
    }


def answer_arguments(load: Load) -> dict[str, Any]:
    """Of `vllm.SamplingParams`."""
    return {"temperature": 0.0, "max_tokens": load.new, "ignore_eos": True, "detokenize": False}


def vocab_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def work(job: Job) -> None:
    """In a process of its own: a row as soon as each load is measured."""
    measured = (
        measure_vllm(job.folder, job.loads) if job.engine == "vLLM" else measure_ours(job.folder, job.loads, job.device)
    )
    for timed in measured:
        job.keep(timed)


def run_offline(job: Job, log: Path, limit: float) -> None:
    """What the engine prints goes to the log."""
    command = [sys.executable, "-m", "quantkit.eval.peers.vllm_bench", "work", *job.words()]
    with log.open("ab") as printed:
        ended = subprocess.run(command, stdout=printed, stderr=printed, timeout=limit, check=False)
    if ended.returncode:
        raise QuantkitError(f"{job.engine} with {job.folder.name} ended with code {ended.returncode}; {log} says why")


def run_served(job: Job, log: Path, limit: float) -> None:
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    found = measure_served(
        job.engine,
        job.folder,
        job.loads,
        device=job.device,
        vocab=vocab_of(job.folder),
        environment=environment,
        log=log,
        limit=limit,
    )
    for timed in found:
        job.keep(timed)


def side_by_side(given: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """Every format through every engine; gives what failed, and goes on with the next."""
    device = resolve_device(given.device)
    formats, engines = given.formats.split(","), given.engines.split(",")
    check_formats(formats)
    if unknown := set(engines) - set(ENGINES):
        raise InputError(f"unknown engine '{unknown.pop()}'; choose from {', '.join(ENGINES)}")
    for engine in engines:
        if not engine_version(engine):
            raise InputError(
                f"{engine} is not installed here; docs/reference/interop.md says how, or leave it out of --engines"
            )
    loads = parse_loads(given.loads) if given.loads else LOADS
    with on_device(device):
        folders = make_folders(given.shape, given.folder, formats, device=device, blocks=given.blocks)
    protocol = SERVED if given.serve else OFFLINE
    failed = []
    for name, folder in folders.items():
        for engine in engines:
            job = Job(engine, folder, name, loads, device, given.output.absolute(), shlex.join(command), protocol)
            job = job if given.again else _left(job)
            if job.loads:
                failed += _run(job, given.folder / f"{engine}-{name}.log", given.limit)
    return failed


def _left(job: Job) -> Job:
    """Without the loads that have rows of today."""
    wanted = {"engine": job.engine, "version": engine_version(job.engine), "protocol": job.protocol}
    wanted |= {"format": job.format, "model": _shape_of(job.folder, job.format)}
    known = speed_rows.done(speed_rows.read(job.output), **wanted)
    return replace(job, loads=tuple(load for load in job.loads if load not in known))


def _run(job: Job, log: Path, limit: float) -> list[str]:
    """Says what was measured, and gives what went wrong."""
    before = len(speed_rows.read(job.output))
    failed = []
    try:
        (run_served if job.protocol == SERVED else run_offline)(job, log, limit)
    except (QuantkitError, subprocess.TimeoutExpired) as error:
        failed.append(f"{job.engine} {job.format}: {error}")
        print(failed[0], flush=True)
    for row in speed_rows.read(job.output)[before:]:
        sizes = f"{row['requests']} x ({row['prompt']} + {row['new']})"
        print(f"{job.engine} {job.format} {sizes}: {row['tokens_per_second']} tokens/s", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["work"]:
        _work(words[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where folders are, or are made")
    parser.add_argument("--shape", choices=PLAIN_SHAPES, default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has")
    parser.add_argument("--formats", default=",".join(FORMATS), metavar="F,...")
    parser.add_argument("--engines", default=",".join(ENGINES), metavar="E,...")
    parser.add_argument("--loads", default="", metavar="L,...", help="requests x prompt + new: 8x128+256")
    parser.add_argument("--serve", action="store_true", help="over HTTP, with the client of `quantkit bench serve`")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds for one engine with one folder")
    parser.add_argument("--again", action="store_true", help="also what has rows of today")
    parser.add_argument("--output", type=Path, default=speed_rows.FILE, metavar="FILE", help="CSV to append to")
    given = parser.parse_args(words)
    try:
        failed = side_by_side(given, ["python", "-m", "quantkit.eval.peers.vllm_bench", *words])
    except QuantkitError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(speed_rows.speed_table(speed_rows.read(given.output)))
    if failed:
        parser.exit(1, "".join(f"{parser.prog}: {line}\n" for line in failed))


def _work(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--engine", "--format", "--device", "--command", "--loads", "--output", "--parent"):
        parser.add_argument(name, required=True)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(words)
    loads = parse_loads(given.loads)
    output = Path(given.output)
    end_with(int(given.parent))
    work(Job(given.engine, given.folder, given.format, loads, given.device, output, given.command, OFFLINE))
    os._exit(0)  # an engine that hangs or fails when Python ends has done its work


if __name__ == "__main__":
    main()
