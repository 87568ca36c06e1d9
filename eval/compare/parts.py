"""The parts of one format's measurement, in order. Each takes what is known so far and adds its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantkit.calibration import Calibration
from quantkit.eval.compare.asked import LAYER_WINDOWS, SAMPLE_ANSWER, SAMPLE_PROMPT, SAMPLES, Asked, Entry
from quantkit.eval.compare.engine_setup import engine_options
from quantkit.eval.compare.results import FormatResult, LayerDamage, Making, Running, Sample, Size, Speed
from quantkit.eval.compare.shape import STORED, entry_format, shape_size
from quantkit.eval.engine.run import measure, measure_bandwidth
from quantkit.eval.engine.start import peak_memory, start_checkpoint, start_shape
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.quality.layer_errors import layer_errors
from quantkit.eval.quality.measure import QualityResult, measure_quality
from quantkit.eval.quality.predictors import Predictor, RememberedPredictor, load_predictor
from quantkit.eval.quality.windows import Windows, read_windows
from quantkit.inspection import inspect_checkpoint
from quantkit.pipeline import quantize
from quantkit.progress import Progress, silent
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Bench:
    """What the parts of one format share."""

    asked: Asked
    entry: Entry
    output: Path  # of the comparison
    on_item: Progress = silent
    bases: dict[str, Predictor] | None = None  # backend -> the unquantized model, kept for the formats that follow

    def base(self, backend: str) -> Predictor:
        """The unquantized model."""
        if self.bases is not None and backend in self.bases:
            return self.bases[backend]
        base = load_predictor(self.asked.model, backend, window=self.asked.window, device=self.asked.device)
        if self.bases is None:
            return base
        return self.bases.setdefault(backend, RememberedPredictor(base))

    @property
    def checkpoint(self) -> str:
        """Where the format's weights are, or will be."""
        return str(self.output / self.entry.name) if self.entry.kind == "recipe" else self.entry.source

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.asked.model)

    @cached_property
    def windows(self) -> Windows:
        asked = self.asked
        return read_windows(self.tokenizer, asked.text, window=asked.window, max_windows=asked.windows)


@dataclass(frozen=True)
class Part:
    """`done` says whether a result has it already."""

    name: str
    run: Callable[[Bench, FormatResult], FormatResult]
    done: Callable[[FormatResult], bool]


def parts_of(asked: Asked, entry: Entry) -> list[Part]:
    """What there is to measure for one format."""
    if asked.of_shape:
        return [Part("speed", run_engine, lambda result: result.running is not None)]
    parts = [
        Part("quantize", make, lambda result: result.making is not None),
        Part("size", weigh, lambda result: result.size is not None),
        Part("quality", judge, lambda result: result.quality is not None),
        Part("reference", judge_reference, lambda result: result.reference_quality is not None),
        Part("layers", find_damage, lambda result: result.damage is not None),
        Part("speed", run_engine, lambda result: result.running is not None),
    ]
    left_out = {"quantize"} if entry.kind == "checkpoint" else set()
    left_out |= {"quantize", "layers"} if entry.kind == "baseline" else set()
    left_out |= set() if asked.reference else {"reference"}
    left_out |= set() if asked.layers else {"layers"}
    return [part for part in parts if part.name not in left_out]


def make(bench: Bench, result: FormatResult) -> FormatResult:
    asked, recipe = bench.asked, load_recipe(bench.entry.source)
    calibration = Calibration.from_recipe(
        recipe.calibration, source=asked.calibration_text, samples=asked.samples, seq_len=asked.seq_len, seed=asked.seed
    )
    with _peak(asked.device) as peak:
        begin = time.perf_counter()
        report = quantize(
            asked.model,
            recipe,
            bench.checkpoint,
            calibration=calibration,
            device=asked.device,
            overwrite=True,
            quality_windows=min(asked.card_windows, asked.windows),
            on_layer=bench.on_item,
        )
        seconds = time.perf_counter() - begin
    return replace(result, making=Making(round(seconds, 2), peak(), report.calibration))


def weigh(bench: Bench, result: FormatResult) -> FormatResult:
    found = inspect_checkpoint(bench.checkpoint)
    bits = found.quantized_bits_per_weight or found.bits_per_weight
    schemes = ", ".join(sorted(found.schemes)) or found.dtype
    return replace(result, size=Size(found.bytes, round(bits, 4)), description=schemes)


def judge(bench: Bench, result: FormatResult) -> FormatResult:
    return replace(result, quality=_quality(bench, "runtime"))


def judge_reference(bench: Bench, result: FormatResult) -> FormatResult:
    return replace(result, reference_quality=_quality(bench, "reference"))


def _quality(bench: Bench, backend: str) -> QualityResult:
    asked = bench.asked
    base = bench.base(backend)
    if bench.entry.kind == "baseline":
        return _against_itself(measure_quality(base, bench.windows, on_window=bench.on_item, seed=asked.seed))
    model = load_predictor(bench.checkpoint, backend, window=asked.window, device=asked.device)
    return measure_quality(model, bench.windows, base, on_window=bench.on_item, seed=asked.seed)


def _against_itself(found: QualityResult) -> QualityResult:
    """The unquantized model loses nothing against itself; nothing needs to be measured for that."""
    none, same = Interval(0.0, 0.0, 0.0), Interval(1.0, 1.0, 1.0)
    return replace(
        found,
        base_perplexity=found.perplexity,
        perplexity_ratio=same,
        kl=none,
        kl_p99=none,
        top1_agreement=same,
        compared_windows=found.windows,
        window_kl=(0.0,) * found.windows,
    )


def find_damage(bench: Bench, result: FormatResult) -> FormatResult:
    asked = bench.asked
    ids = bench.windows.ids[:LAYER_WINDOWS]
    found = layer_errors(asked.model, bench.checkpoint, ids, asked.device, on_block=bench.on_item)
    linears: dict[str, list[float | None]] = {name: list(errors) for name, errors in found.linears.items()}
    return replace(result, damage=LayerDamage(linears, list(found.blocks)))


def run_engine(bench: Bench, result: FormatResult) -> FormatResult:
    """Speed and memory; with the same engine, sample continuations."""
    asked, options = bench.asked, engine_options(bench.asked)
    with _peak(asked.device) as peak:
        if asked.of_shape:
            fmt = entry_format(asked.model, bench.entry, str(options.torch_dtype(STORED))[6:])
            engine, started = start_shape(asked.model, fmt, options, first=True)
            result = replace(result, size=shape_size(asked.model, bench.entry), description=started.format)
        else:
            engine, started = start_checkpoint(bench.checkpoint, options, first=True)
        bandwidth = measure_bandwidth(options.torch_device)
        speeds = []
        for load in asked.loads:
            times = measure(engine, load, bandwidth, seed=asked.seed)
            limit = None if times.percent_of_limit is None else round(times.percent_of_limit, 1)
            rate, first, gap = times.tokens_per_second, times.first_token_ms[0], times.gap_ms[0]
            speeds.append(
                Speed(load.batch, load.prompt, load.new, round(rate, 1), round(first, 2), round(gap, 3), limit)
            )
            bench.on_item(f"{load.batch} at once", len(asked.loads))
        highest = peak() and peak_memory(options.torch_device)
    running = Running(started.weights, started.kv_tokens, highest, round(started.ready, 2), tuple(speeds))
    samples = () if asked.of_shape else tuple(_samples(engine, bench.tokenizer, bench.windows))
    return replace(result, running=running, samples=samples)


def _samples(engine: Engine, tokenizer: PreTrainedTokenizerBase, windows: Windows) -> Iterator[Sample]:
    """Greedy continuations of the beginnings of some windows."""
    step = max(1, len(windows) // SAMPLES)
    for ids in windows.ids[::step][:SAMPLES]:
        prompt = ids[: min(SAMPLE_PROMPT, windows.window - 1)].tolist()
        request = engine.add(prompt, SamplingParams(max_tokens=SAMPLE_ANSWER))
        while engine.unfinished:
            engine.step()
        engine.drain()
        texts = [tokenizer.decode(tokens, skip_special_tokens=True)
                 for tokens in (prompt, prompt + request.sequences[0].answer)]  # fmt: skip
        yield Sample(texts[0], texts[1].removeprefix(texts[0]))


@contextmanager
def _peak(device: str) -> Iterator[Callable[[], int | None]]:
    """Gives a function that tells the most GPU memory held since here; frees what is left of parts before."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield lambda: None if device == "cpu" else torch.cuda.max_memory_reserved()
