"""One checkpoint: made by its tool, read by us, measured on the protocol."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from safetensors.torch import save_file

from quantkit.calibration import Calibration
from quantkit.errors import QuantkitError
from quantkit.eval.compare.machine import describe_machine
from quantkit.eval.peers import llama_bench
from quantkit.eval.peers.bases import Base
from quantkit.eval.peers.environments import environment_of, llama_programs, version_of
from quantkit.eval.peers.jobs import TOOLS, Job
from quantkit.eval.peers.rows import Row
from quantkit.provenance import origin_of
from quantkit.reference import load_tokenizer

_QUANTKIT = (sys.executable, "-m", "quantkit")
_TOOLS = "quantkit.eval.peers.tools"


@dataclass(frozen=True)
class Bench:
    """Where everything lies, and on what it runs."""

    base: Base
    work: Path
    device: str
    packages: Mapping[str, Path] = field(default_factory=dict)  # of tools that this interpreter runs

    def folder(self, job: Job, calibration: str | None) -> Path:
        """Where a job's checkpoint goes."""
        parts = (self.base.name, job.tool, job.method, job.bits, job.group, job.steps, calibration)
        return self.work / "made" / "-".join(str(part).replace(" ", "_") for part in parts if part is not None)


@dataclass(frozen=True)
class Made:
    folder: Path
    version: str
    seconds: float
    host_gib: float
    gpu_gib: float
    command: str


def run(bench: Bench, job: Job, calibration: str | None) -> Row:
    """`calibration` is one of the base's texts by name, or None for a method that needs none."""
    base, made = bench.base, make(bench, job, calibration)
    folder, bits = _readable(made.folder, base)
    command = (
        "eval", folder, "--base", base.folder, "--text", base.text, "--max-windows", base.windows,
        "--kl-windows", base.compared, "--exact-activations", "--device", bench.device, "--json",
    )  # fmt: skip
    found = _json_of(*command)
    return Row(
        date=date.today().isoformat(),
        machine=describe_machine(bench.device).device,
        tool=job.tool,
        version=made.version,
        method=job.method,
        bits=job.bits,
        group=job.group or base.group,
        steps=job.steps,
        model=base.name,
        origin=str(origin_of(base.folder)),
        calibration=calibration or "none",
        calibrated_on=Path(base.calibrations[calibration]).name if calibration else "",
        seconds=made.seconds,
        peak_host_gib=made.host_gib,
        peak_gpu_gib=made.gpu_gib,
        bits_per_weight=round(bits, 3),
        perplexity=round(found["perplexity"]["value"], 4),
        base_perplexity=round(found["base_perplexity"]["value"], 4),
        kl=round(found["kl"]["value"], 5),
        top1_agreement=round(found["top1_agreement"]["value"], 4),
        protocol=found["protocol"],
        command=made.command,
        measured_by=_spoken(("quantkit", *command), base, made.folder),
    )


def make(bench: Bench, job: Job, calibration: str | None) -> Made:
    """Runs the tool in its environment. What it prints goes to a file beside its folder."""
    base, tool = bench.base, TOOLS[job.tool]
    folder = bench.folder(job, calibration)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = environment_of(job.tool, bench.work, bench.packages.get(job.tool))
    text = base.calibrations[calibration or "default"]
    words: tuple[object, ...]
    if tool.script:
        words = (f"{_TOOLS}.{tool.script}", base.folder, _tokens(bench, text), folder, "--method", job.method)
        words += ("--bits", job.bits, "--group", job.group or base.group, "--device", bench.device)
        words += ("--steps", job.steps) if job.steps else ()
    else:
        words = ("quantkit", "quantize", base.folder, "-r", job.recipe(base.group), "-o", folder)
        words += ("--quality-windows", 0, "--device", bench.device, *(("--text", text) if calibration else ()))
    log, peaks = (folder.with_name(f"{folder.name}.{kind}") for kind in ("log", "json"))
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            [str(word) for word in (environment.python, "-m", f"{_TOOLS}.watched", peaks, *words)],
            stdout=output, stderr=subprocess.STDOUT, cwd=folder.parent, env=environment.variables,
        ).returncode  # fmt: skip
    seconds = round(time.monotonic() - began, 1)
    if code:
        raise QuantkitError(f"{job.tool} ended with exit code {code}: {_last_line(log)} ({log})")
    peak = json.loads(peaks.read_text(encoding="utf-8"))
    spoken = _spoken(words if tool.script == "" else ("python", "-m", *words), base, folder)
    return Made(folder, version_of(job.tool, environment), seconds, peak["host"], peak["gpu"], spoken)


def race(bench: Bench, job: Job, calibration: str | None) -> None:
    """Rows of speed: a file that llama.cpp made, run by it and by us on this CPU in turns, beside the whole model."""
    made = bench.folder(job, calibration) / "model.gguf"
    named = bench.work / "made" / f"{bench.base.name}-{job.method}.gguf"  # as rows call it
    named.unlink(missing_ok=True)
    named.symlink_to(made)
    words = (llama_programs(bench.work), "--model", bench.base.name, "--ours", named, "--ours", bench.base.folder)
    llama_bench.main([str(word) for word in (*words, "--theirs", named)])


def _tokens(bench: Bench, text: str) -> Path:
    """The tokens that quantkit would calibrate with, for the others."""
    file = bench.work / f"{bench.base.name}-{Path(text).stem.replace(':', '-').replace('@', '-')}.safetensors"
    if not file.exists():
        tokens = Calibration(text).tokens(load_tokenizer(bench.base.folder), context=2048)
        save_file({"tokens": tokens.int().contiguous()}, file)
    return file


def _readable(folder: Path, base: Base) -> tuple[Path, float]:
    """A folder that quantkit reads, and the bits of a weight in its quantized layers. Tokens are the base's."""
    file = folder / "model.gguf"
    if not file.exists():
        return folder, float(_json_of("inspect", folder, "--json")["quantized_bits_per_weight"])
    tensors = [tensor for tensor in GGUFReader(file).tensors if tensor.tensor_type.name.startswith("Q")]
    _json_of("import", file, "-o", folder / "decoded", "--dtype", "float32", "--overwrite", "--json")
    for tokenizer in base.folder.glob("tokenizer*"):
        shutil.copy(tokenizer, folder / "decoded")
    bits = 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)
    return folder / "decoded", bits


def _json_of(*words: object) -> Any:
    done = subprocess.run([*_QUANTKIT, *(str(word) for word in words)], capture_output=True, text=True)
    if done.returncode:
        raise QuantkitError(f"quantkit {words[0]} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def _spoken(words: tuple[object, ...], base: Base, output: Path) -> str:
    """A command as a reader would give it, without paths of this machine."""
    names = {str(base.folder): base.name, str(output): "OUT"}
    said = [names.get(str(word), str(word)) for word in words]
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in said)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
