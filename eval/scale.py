"""What quantizing a large model takes: time and peak memory, on random weights of a known shape.

    python -m quantkit.eval.scale llama-3.1-8b gptq-w4g128 --device cuda --samples 128 --seq-len 2048
    python -m quantkit.eval.scale llama-3.1-8b nf4 llm-int8 --device cuda
    python -m quantkit.eval.scale qwen2.5-1.5b gptq-w4g128 --device cpu --samples 128 --seq-len 32

Random weights say nothing about quality; time and memory do not depend on the values. The tokenizer is the bundled
model's, so that calibration text can be read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.calibration import Calibration
from quantkit.defaults import DEVICE, QUALITY_WINDOWS
from quantkit.devices import on_device, resolve_device
from quantkit.errors import InputError
from quantkit.eval.shapes import PLAIN_SHAPES
from quantkit.pipeline import quantize
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

SHARD_TENSORS = 32


def make_model(shape: str, folder: Path, *, blocks: int | None = None, device: str = "cpu") -> Path:
    """A checkpoint of random weights in bfloat16, sharded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = PLAIN_SHAPES[shape] | {"dtype": "bfloat16"}
    if blocks is not None:
        settings["num_hidden_layers"] = blocks
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(folder)
    names = [name for name in skeleton.state_dict() if name != "lm_head.weight" or not config.tie_word_embeddings]
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for start in range(0, len(names), SHARD_TENSORS):
        shard = {}
        for name in names[start : start + SHARD_TENSORS]:
            size = skeleton.state_dict()[name].shape
            values = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
            shard[name] = (torch.ones_like(values) if name.endswith("norm.weight") else values).cpu()
        file = f"model-{start // SHARD_TENSORS:05d}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for tokenizer in model_folder("demo").glob("tokenizer*"):
        shutil.copy(tokenizer, folder)
    os.sync()  # a run that is timed does not wait until this file is on disk
    return folder


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
        "blocks": len(report.layers) // 7,
        "calibration": f"{samples} x {seq_len}",
        "device": torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} threads",
        "seconds": round(seconds, 1),
        "peak_gpu_gib": round(gpu / 2**30, 2),
        "peak_resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=PLAIN_SHAPES)
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
