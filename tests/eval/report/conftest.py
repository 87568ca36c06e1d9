"""Comparisons as `quantkit compare` would measure them: plausible, and none of them measured."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantkit.eval.compare.results import (
    Comparison,
    FormatResult,
    LayerDamage,
    Machine,
    Making,
    Running,
    Sample,
    Size,
    Speed,
)
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.quality.measure import QualityResult
from quantkit.eval.report.write import write_report
from quantkit.provenance import CalibrationData, Origin, Provenance

LAYERS = 8
WINDOWS = 64
BATCHES = (1, 8, 32, 256)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HOSTILE = '<script>harm()</script> "it\'s" & 🦙 $x_1$ </pre>`|`\x00\x1b[31m' + "very-long-" * 12
GPU = Machine("NVIDIA H200", True, 16, 150_754_820_096, {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"})
CPU = Machine("AMD EPYC 7B13", False, 8, 33_554_432_000, {"python": "3.11.9", "torch": "2.13.0"})

# name: description, bytes, bits, perplexity / base, KL, agreement, tokens/s at each batch, seconds to make
FORMATS: dict[str, tuple[str, int, float, float, float, float, tuple[float, ...], float | None]] = {
    "bfloat16": ("bf16", 269_060_552, 16.0, 1.0, 0.0, 1.0, (412.3, 3120.4, 10871.0, 31240.0), None),
    "llm-int8": ("W8 rows, A8", 163_212_880, 8.06, 1.0021, 0.00123, 0.9713, (498.1, 3604.0, 12950.2, 38011.0), 4.2),
    "nf4": ("NF4 b64 double", 111_840_216, 4.13, 1.0612, 0.0498, 0.8741, (541.9, 3988.1, 12241.7, 29876.0), 3.1),
    "gptq-w4g128": ("W4 g128 sym", 112_450_944, 4.25, 1.0389, 0.0341, 0.8962, (688.4, 4822.3, 14011.0, 30105.0), 48.8),
    "awq-w4g128": ("W4 g128 asym", 112_911_744, 4.31, 1.0356, 0.0329, 0.8979, (671.2, 4790.9, 13850.4, 29990.0), 61.3),
    "gptq-w3g128": ("W3 g128 sym", 99_180_288, 3.25, 1.2417, 0.1893, 0.7604, (702.5, 4711.8, 12877.3, 28411.0), 50.9),
    "fp8": ("FP8 rows", 163_214_336, 8.06, 1.0064, 0.00487, 0.9476, (), 2.7),
    "rtn-w2g64": ("W2 g64 asym", 90_771_456, 2.5, 71.8, 3.912, 0.1377, (640.8, 4400.0, 12010.1, 27050.0), 2.2),
}
FEW = ("bfloat16", "nf4", "fp8")  # the last one failed
BASE_TEXT = (
    "The function returns a list of all keys in the mapping, in the order in which they were added. If the mapping is "
    "empty, an empty list is returned.\n\n    >>> keys({})\n    []\n\nChanged in version 3.7: order is guaranteed."
)
TEXTS = {
    "llm-int8": BASE_TEXT,
    "nf4": BASE_TEXT.replace("in the order in which they were added", "sorted by their length"),
    "gptq-w4g128": BASE_TEXT.replace("Changed in version 3.7: order is guaranteed.", "Changed in version 3.8."),
    "awq-w4g128": BASE_TEXT.replace("all keys in", "the keys of"),
    "gptq-w3g128": "The function returns a list of strings. The list is sorted, and the list is a list of the list.",
    "fp8": BASE_TEXT.replace(" is returned", ""),
    "rtn-w2g64": "the the of of ,, the a and the the of in the the , the the",
}
PROMPTS = ("Return the keys of a mapping.", "def read_lines(path):", "A decorator is")


def interval(value: float, spread: float) -> Interval:
    return Interval(value, value * (1 - spread), value * (1 + spread))


# How much harder a window is than the average, the same for every format.
HARDNESS = tuple(1 + 0.3 * math.sin(1.7 * window) for window in range(WINDOWS))


def quality(ratio: float, kl: float, agreement: float, backend: str = "runtime") -> QualityResult:
    return QualityResult(
        perplexity=interval(23.98 * ratio, 0.03),
        bits_per_byte=interval(0.9471 * ratio**0.2, 0.01),
        base_perplexity=interval(23.98, 0.03),
        perplexity_ratio=Interval(ratio, 1 + (ratio - 1) * 0.82, 1 + (ratio - 1) * 1.2),
        kl=interval(kl, 0.06),
        kl_p99=interval(kl * 11.3, 0.12),
        top1_agreement=Interval(agreement, agreement - 0.004, min(1.0, agreement + 0.004)),
        tokens=65_472,
        bytes=289_113,
        windows=WINDOWS,
        window=1024,
        compared_windows=WINDOWS,
        text="heldout.txt",
        protocol="heldout.txt: windows 64, window 1024 tokens, stride 1024, first token of a window not scored",
        backend=backend,
        dtype="bfloat16",
        device="cuda",
        arithmetic=f"{backend}: paged attention, bfloat16 on cuda",
        seed=0,
        window_losses=tuple(math.log(23.98 * ratio) * hardness for hardness in HARDNESS),
        window_kl=tuple(kl * hardness for hardness in HARDNESS),
    )


def running(weights: int, rates: tuple[float, ...], gpu: bool = True) -> Running:
    speeds = tuple(
        Speed(batch, 512, 256, rate, 9.37 + 1.71 * batch, 1e3 * batch / rate, 41.2 - 0.01 * batch if gpu else None)
        for batch, rate in zip(BATCHES, rates, strict=False)
    )
    cache = (120_000_000_000 - weights) // 23_040
    return Running(weights - 1_000_000, cache, 131_000_000_000 + weights if gpu else None, 7.94, speeds)


def damage(size: float) -> LayerDamage:
    linears: dict[str, list[float | None]] = {
        name: [size * (0.6 + 0.13 * place) * (1 + 0.4 * (layer == 1)) for layer in range(LAYERS)]
        for place, name in enumerate(LINEARS)
    }
    linears["down_proj"][0] = None
    return LayerDamage(linears, [size * (0.5 + 0.11 * layer) for layer in range(LAYERS)])


def samples(text: str) -> tuple[Sample, ...]:
    return tuple(Sample(prompt, text if place == 0 else f"{text[: 90 + 20 * place]} ...") for place, prompt in
                 enumerate(PROMPTS))  # fmt: skip


def format_result(name: str) -> FormatResult:
    description, size, bits, ratio, kl, agreement, rates, making = FORMATS[name]
    baseline, folder = name == "bfloat16", f"out/{name}"
    return FormatResult(
        name=name,
        description=description,
        baseline=baseline,
        commands=() if baseline else (f"quantkit quantize demo -r {name} -o {folder}", f"quantkit eval {folder}"),
        error=None if rates else "QuantkitError: the kernel for fp8 asked for 131,072 bytes of shared memory",
        size=Size(size, bits),
        making=None if making is None else Making(making, 1_480_000_000, {"text": "calibration.txt", "samples": 128}),
        quality=quality(ratio, kl, agreement),
        reference_quality=quality(ratio * 1.0004, kl * 1.01, agreement, "reference"),
        damage=None if baseline else damage(kl**0.5 / 3),
        running=running(size, rates) if rates else None,
        samples=samples(BASE_TEXT if baseline else TEXTS[name]),
        provenance=Provenance(
            Origin("gguf", file="base.gguf", tensor_types={"Q8_0": 7}),
            CalibrationData("unknown" if name == "nf4" else "text", "mine.jsonl", False, 64, 512),
        ),
    )


def comparison_of(formats: tuple[FormatResult, ...], **changes: Any) -> Comparison:
    whole = Comparison(
        model="HuggingFaceTB/SmolLM2-135M",
        family="Llama",
        parameters=134_515_008,
        machine=GPU,
        date="2026-11-16",
        command="quantkit compare HuggingFaceTB/SmolLM2-135M -o report",
        seed=17,
        formats=formats,
        notes=("The GPU was used by nobody else.",),
    )
    return replace(whole, **changes)


def on_a_cpu(found: FormatResult) -> FormatResult:
    rates = tuple(rate / 20 for rate in FORMATS[found.name][6][:2])
    making = found.making and replace(found.making, peak_bytes=None)
    size = found.size.bytes if found.size else 0
    return replace(found, making=making, running=running(size, rates, gpu=False) if rates else None)


def hostile(found: FormatResult) -> FormatResult:
    texts = tuple(Sample(HOSTILE, HOSTILE + found.name + "endless" * 900) for _ in found.samples[:1])
    return replace(
        found,
        name=f"{found.name} {HOSTILE}",
        description=HOSTILE,
        commands=(HOSTILE,),
        error=found.error and HOSTILE,
        samples=texts,
        damage=found.damage and LayerDamage({HOSTILE: [0.1, None]}, [0.2, 0.3]),
    )


def variant(name: str) -> Comparison:
    """With "-few" behind the name of three formats: charts are drawn in a third of the time."""
    every = tuple(format_result(one) for one in (FEW if name.endswith("-few") else FORMATS))
    name = name.removesuffix("-few")
    if name == "full":
        return comparison_of(every)
    if name == "cpu":
        return comparison_of(tuple(on_a_cpu(found) for found in every[:5]), machine=CPU, notes=("Speeds are a CPU's.",))
    if name == "shape":
        bare = tuple(
            replace(
                found, quality=None, reference_quality=None, damage=None, samples=(), making=None, provenance=None
            )
            for found in every
        )  # fmt: skip
        return comparison_of(bare, model="llama-3.1-8b", notes=())
    if name == "single":
        return comparison_of(every[:1])
    if name == "no-speeds":
        return comparison_of(
            tuple(replace(found, running=None, error=None, reference_quality=None) for found in every[:4])
        )
    if name == "failed":
        return comparison_of(
            tuple(FormatResult(found.name, found.description, found.baseline, error="no space left") for found in every)
        )
    if name == "empty":
        return comparison_of(())
    assert name == "hostile", name
    return comparison_of(tuple(hostile(found) for found in every), model=HOSTILE, family=HOSTILE, command=HOSTILE,
                         notes=(HOSTILE,), machine=replace(GPU, device=HOSTILE))  # fmt: skip


VARIANTS = ("full", "cpu", "shape", "single", "no-speeds", "failed", "empty", "hostile")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with the report of a variant, written once."""
    folder = tmp_path_factory.mktemp("reports")

    @cache
    def write(name: str) -> Path:
        return write_report(variant(name), folder / name).parent

    return write


@pytest.fixture(scope="session")
def variants() -> Callable[[str], Comparison]:
    return variant


@pytest.fixture
def comparing() -> Callable[..., Comparison]:
    """A comparison of formats given by name as keyword arguments of `measured`, or None for one that failed."""

    def build(gpu: bool = True, **formats: dict[str, Any] | None) -> Comparison:
        made = tuple(measured(name.replace("_", "-"), **(given or {"error": "it broke"}))
                     for name, given in formats.items())  # fmt: skip
        return comparison_of(made, machine=GPU if gpu else CPU)

    return build


def measured(
    name: str,
    size: int = 100,
    ratio: float | tuple[float, float, float] | None = None,
    kl: float | tuple[float, float, float] | None = None,
    rate: float | None = None,
    batch: int = 1,
    error: str | None = None,
    window_kl: tuple[float, ...] | None = None,
) -> FormatResult:
    """A format with these few numbers; a tuple is value, low, high. Without `window_kl` as it was stored once."""
    found = None
    if ratio is not None:
        ratios, losses = (Interval(*one) if isinstance(one, tuple) else Interval(one or 0.0) for one in (ratio, kl))
        found = replace(
            quality(1.0, 0.0, 1.0), perplexity_ratio=ratios, kl=losses, window_kl=window_kl, window_losses=None
        )
    speeds = () if rate is None else (Speed(batch, 16, 16, rate, 1.0, 1.0, None),)
    return FormatResult(
        name,
        "",
        baseline=name == "base",
        error=error,
        size=Size(size, 4.0),
        quality=found,
        running=Running(size, 1, None, 1.0, speeds) if speeds else None,
    )


@pytest.fixture
def full() -> Comparison:
    return variant("full")
