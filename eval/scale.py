"""What quantizing a large model takes: time and peak memory, on random weights of a known shape.

    python -m quantkit.eval.scale llama-3.1-8b gptq-w4g128 --device cuda --samples 128 --seq-len 2048
    python -m quantkit.eval.scale llama-3.1-8b nf4 llm-int8 --device cuda
    python -m quantkit.eval.scale qwen2.5-1.5b gptq-w4g128 --device cpu --samples 128 --seq-len 32
    TMPDIR=/dev/shm python -m quantkit.eval.scale qwen3-30b-a3b gptq-w4g128 --samples 128 --seq-len 2048

Random weights say nothing about quality; time and memory do not depend on the values. The tokenizer is the bundled
model's, so that calibration text can be read. The model is written where temporary files go.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.arch import FAMILIES
from quantkit.calibration import Calibration
from quantkit.defaults import DEVICE, QUALITY_WINDOWS
from quantkit.devices import on_device, resolve_device
from quantkit.errors import InputError
from quantkit.eval.shapes import EXPERT_SHAPES, PLAIN_SHAPES, QUANTIZED_EXPERTS
from quantkit.expert_modules import file_name, separate_experts
from quantkit.pipeline import quantize
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

SHAPES = PLAIN_SHAPES | {name: shape for name, shape in EXPERT_SHAPES.items() if name not in QUANTIZED_EXPERTS}
SHARD_BYTES = 2 << 30
Sizes = dict[str, torch.Size]


def make_model(shape: str, folder: Path, *, blocks: int | None = None, device: str = "cpu") -> Path:
    """A checkpoint of random weights in bfloat16, sharded."""
    from transformers import AutoConfig

    settings = SHAPES[shape] | {"dtype": "bfloat16"}
    if blocks is not None:
        settings["num_hidden_layers"] = blocks
    config = AutoConfig.for_model(**settings)
    sizes = _stored_sizes(config, settings)
    config.save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_shards(sizes)):
        shard = {}
        for name in names:
            values = torch.randn(sizes[name], generator=generator, device=device, dtype=torch.bfloat16) * 0.02
            shard[name] = (torch.ones_like(values) if name.endswith("norm.weight") else values).cpu()
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for tokenizer in model_folder("demo").glob("tokenizer*"):
        shutil.copy(tokenizer, folder)
    os.sync()  # a run that is timed does not wait until this file is on disk
    return folder


def _stored_sizes(config: Any, settings: dict[str, Any]) -> Sizes:
    """Of every tensor by its name in published files, which keep experts one by one; names the architecture, too."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]
    family = FAMILIES[settings["model_type"]]
    separate_experts(skeleton.get_submodule(family.blocks), family, settings)
    sizes = {file_name(family, name): tensor.shape for name, tensor in skeleton.state_dict().items()}
    if config.tie_word_embeddings:
        sizes.pop("lm_head.weight", None)
    return sizes


def _shards(sizes: Sizes) -> Iterator[list[str]]:
    names: list[str] = []
    taken = 0
    for name, size in sizes.items():
        names.append(name)
        taken += size.numel() * torch.bfloat16.itemsize
        if taken >= SHARD_BYTES:
            yield names
            names, taken = [], 0
    if names:
        yield names


def seconds_to_read(model: Path) -> float:
    """All weights, once, as the file system gives them."""
    began = time.monotonic()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.read(64 << 20):
                pass
    return round(time.monotonic() - began, 1)


def measure(
    model: Path,
    recipe: str,
    output: Path,
    *,
    device: str,
    samples: int,
    seq_len: int,
    quality_windows: int = QUALITY_WINDOWS,
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Seconds and peak memory of one run, everything included: reading, writing, verifying, measuring quality."""
    calibration = Calibration(samples=samples, seq_len=seq_len)
    began = time.monotonic()
    report = quantize(
        model,
        load_recipe(recipe, changes),
        output,
        calibration=calibration,
        device=device,
        overwrite=True,
        quality_windows=quality_windows,
    )
    seconds = time.monotonic() - began
    gpu = torch.cuda.max_memory_reserved() if device != "cpu" else 0
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    return {
        "recipe": " ".join((recipe, *changes)),
        "layers": len(report.layers),
        "calibration": f"{samples} x {seq_len}",
        "device": torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} threads",
        "seconds": round(seconds, 1),
        "peak_gpu_gib": round(gpu / 2**30, 2),
        "peak_resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("recipes", nargs="+", metavar="recipe")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--quality-windows", type=int, default=QUALITY_WINDOWS)
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipes")
    given = parser.parse_args()
    try:
        device = resolve_device(given.device)
        for recipe in given.recipes:
            load_recipe(recipe, given.set)
    except InputError as error:  # before a model is made
        parser.error(str(error))
    with on_device(device), tempfile.TemporaryDirectory() as folder:
        model = make_model(given.shape, Path(folder, "model"), blocks=given.blocks, device=device)
        options = {"device": device, "samples": given.samples, "seq_len": given.seq_len}
        options |= {"quality_windows": given.quality_windows, "changes": given.set}
        for recipe in given.recipes:
            reading = seconds_to_read(model)
            row = measure(model, recipe, Path(folder, "out"), **options)
            print(json.dumps({"shape": given.shape, **row, "reading_seconds": reading}), flush=True)


if __name__ == "__main__":
    main()
