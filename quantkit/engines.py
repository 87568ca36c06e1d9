"""Which engines load a checkpoint, and why others will not: the rules of each, written down once.

Read from the engines' sources in August 2026 (vLLM, SGLang, transformers 5.22 with gptqmodel, bitsandbytes and
compressed-tensors). What speaks against a format alone, the format says (`Format.refusals`), and its dialect which
packages an engine needs; here stand the rules over several layers. No reason against means that the engine loads it.

Where somebody gave an engine a checkpoint of the same layout, the verdict names that run (`engine_runs.py`); a test
fails where a run and the rules disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from quantkit.engine_runs import Run, run_of_layout
from quantkit.formats import CtPacked, Dialect, Format, IntegerFormat, Refusal, dialect_of
from quantkit.formats.base import EngineName, name_in_block
from quantkit.formats.compressed_tensors import CompressedTensorsDialect
from quantkit.formats.gptq import Gptq, GptqDialect

NOT_RUN = "by its source, not run"
UNQUANTIZED = "unquantized"


@dataclass(frozen=True)
class Layers:
    """What the rules look at: the quantized modules, and the linears of the blocks left unquantized."""

    formats: Mapping[str, Format]
    kept_in_blocks: tuple[str, ...] = ()
    experts_apart: bool = False  # one by one, in a family whose experts others read from one tensor

    @property
    def kept_unevenly(self) -> bool:
        """Whether some blocks keep a layer that others quantize."""
        quantized = {name_in_block(module) for module in self.formats}
        return not quantized.isdisjoint(name_in_block(module) for module in self.kept_in_blocks)

    @property
    def has_experts(self) -> bool:
        """Whether experts are quantized."""
        return any(".experts." in module for module in self.formats)

    @property
    def distinct(self) -> tuple[Format, ...]:
        """In the order of their first layer."""
        return tuple(dict.fromkeys(self.formats.values()))


@dataclass(frozen=True)
class Verdict:
    """Whether one engine loads the checkpoint: the reasons against, or what to install beside the engine."""

    engine: EngineName
    reasons: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    run: Run | None = None  # of a checkpoint of this layout

    @property
    def loads(self) -> bool:
        return not self.reasons

    @property
    def remark(self) -> str:
        """For people: why not, or with what."""
        return "; ".join(self.reasons) or (f"with {' and '.join(self.packages)}" if self.packages else "")

    @property
    def evidence(self) -> str:
        """For people: what the verdict rests on; nothing for quantkit, which is this program."""
        if self.engine == "quantkit":
            return ""
        return NOT_RUN if self.run is None else f"run with {self.engine} {self.run.version}, {self.run.date}"

    def to_dict(self) -> dict[str, Any]:
        return {"engine": self.engine, "loads": self.loads, "remark": self.remark, "evidence": self.evidence}


def verdicts(layers: Layers) -> list[Verdict]:
    """One verdict per engine; a plain checkpoint loads everywhere."""
    dialect, layout = dialect_of(layers.formats) if layers.formats else None, layout_of(layers)
    refusals = list(_refusals(layers, dialect))
    refusals += [refusal for fmt in layers.distinct for refusal in fmt.refusals()]
    found = []
    for engine in get_args(EngineName):
        reasons = tuple(dict.fromkeys(refusal.reason for refusal in refusals if refusal.engine == engine))
        packages = () if reasons or dialect is None else dialect.packages.get(engine, ())
        found.append(Verdict(engine, reasons, packages, run_of_layout(engine, layout)))
    return found


def layout_of(layers: Layers) -> str:
    """What an engine must know to load the layers, such as `gptq W4 g128 sym`: layouts alike are loaded alike.

    Of mixed layers, the kinds without their groups: how many of a kind there are, and where, differs in every model.
    """
    if not layers.formats:
        return UNQUANTIZED
    mixed = len(layers.distinct) > 1
    kinds = sorted({_kind(fmt, mixed=mixed) for fmt in layers.distinct})
    words = [dialect_of(layers.formats).quant_method, *(["mixed"] if mixed else []), " + ".join(kinds)]
    if "lm_head" in layers.formats:
        words.append("with lm_head")
    if layers.has_experts:
        words.append("with experts")
    if layers.kept_in_blocks:
        words.append("kept unevenly" if layers.kept_unevenly else "with layers kept")
    return " ".join(words)


def _kind(fmt: Format, *, mixed: bool) -> str:
    described = fmt.describe()
    if mixed and isinstance(fmt, IntegerFormat) and fmt.input_rounding is None:
        described = f"W{fmt.bits} {'sym' if fmt.sym else 'asym'}"
    return f"{described} v2" if isinstance(fmt, Gptq) and fmt.version == 2 else described


def _refusals(layers: Layers, dialect: Dialect | None) -> Iterator[Refusal]:
    """What speaks against the layers together."""
    mixed, gptq = len(layers.distinct) > 1, isinstance(dialect, GptqDialect)
    if layers.experts_apart:
        said = "reads all experts of a layer of this family from one tensor, but here they are stored one by one"
        yield from (Refusal(engine, said) for engine in get_args(EngineName) if engine != "quantkit")
    elif layers.has_experts and dialect is not None:
        yield from dialect.refusals_of_experts
        if any(isinstance(fmt, CtPacked) and not fmt.sym for fmt in layers.distinct):
            yield Refusal("transformers", "does not read zero points of experts; use a symmetric recipe")
    if mixed and isinstance(dialect, CompressedTensorsDialect):
        yield Refusal("SGLang", "mixed compressed-tensors groups are not fused")
    if mixed and gptq:
        remedy = "convert to compressed-tensors"
        yield Refusal("transformers", f"ignores GPTQ's per-module rules, so mixed bits load wrong; {remedy}")
        yield Refusal("vLLM", f"matches GPTQ's per-module rules against fused names; {remedy}")
    if gptq and layers.kept_unevenly:
        said = (
            "reads one list of quantized layers for all blocks, but here blocks differ; convert to compressed-tensors"
        )
        yield Refusal("transformers", said)
    if gptq and "lm_head" in layers.formats:
        yield Refusal("transformers", "does not read a quantized lm_head in GPTQ")
