"""Which engines load a checkpoint, and why others will not: the rules of each, written down once.

What speaks against a format alone, the format says (`Format.refusals`); its dialect says who reads it, who does not,
and which packages that needs; here stand the rules over several layers. An engine loads a checkpoint when a source
says that it reads the dialect and nothing speaks against it; where no source was found, the answer is "unknown".
Which sources were read, and in which state, stands in `formats/engine_rules.py`.

Where somebody gave an engine a checkpoint of the same layout, the verdict names that run (`engine_runs.py`); a test
fails where a run and the rules disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.engine_runs import Run, run_of_blocks, run_of_layout
from quantkit.formats import CtPacked, Dialect, Format, Gguf, IntegerFormat, Refusal, dialect_of
from quantkit.formats import engine_rules as rules
from quantkit.formats.awq import AwqDialect
from quantkit.formats.base import name_in_block
from quantkit.formats.compressed_tensors import CompressedTensorsDialect
from quantkit.formats.engine_rules import PROJECTS, EngineName
from quantkit.formats.gguf import GgufDialect
from quantkit.formats.gptq import Gptq, GptqDialect
from quantkit.formats.mxfp4 import Mxfp4Dialect

NOT_RUN = "by its source, not run"
NO_SOURCE = "no source was found that says whether it reads this layout"
UNQUANTIZED = "unquantized"
# Seen with transformers 5.23 (docs/reference/interop.md).
DECODE_ZERO_POINTS = (
    "compressed-tensors 0.20 makes no room for packed zero points: give from_pretrained "
    "quantization_config=CompressedTensorsConfig(dequantize=True)"
)


@dataclass(frozen=True)
class Layers:
    """What the rules look at: the quantized modules, and the linears of the blocks left unquantized."""

    formats: Mapping[str, Format]
    kept_in_blocks: tuple[str, ...] = ()
    experts_apart: bool = False  # one by one, in a family whose experts others read from one tensor
    gguf_file: bool = False  # they lie in one, whatever their types

    @property
    def dialect(self) -> Dialect | None:
        """None: a folder with no layer quantized."""
        if self.gguf_file:
            return GgufDialect()
        return dialect_of(self.formats) if self.formats else None

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
    reasons: tuple[str, ...] = ()  # against it, or why it is not known
    packages: tuple[str, ...] = ()
    run: Run | None = None  # of a checkpoint of this layout
    sources: tuple[str, ...] = ()  # paths in the engine's project, where this was read
    known: bool = True
    advice: str = ""  # what loading it needs

    @property
    def loads(self) -> bool | None:
        """None: not known."""
        return not self.reasons if self.known else None

    @property
    def answer(self) -> str:
        return {True: "yes", False: "no", None: "unknown"}[self.loads]

    @property
    def remark(self) -> str:
        """For people: why not, or with what."""
        project = PROJECTS.get(self.engine)
        beside = f"with {' and '.join(self.packages)}" if self.packages else ""
        words = self.reasons or (beside, self.advice, project.note if project else "")
        return "; ".join(word for word in words if word)

    @property
    def evidence(self) -> str:
        """For people: what the verdict rests on; nothing for quantkit, which is this program."""
        if self.engine == "quantkit":
            return ""
        if self.run is not None:
            return f"run with {self.engine} {self.run.version}, {self.run.date}"
        return NOT_RUN if self.sources else "not run"

    def to_dict(self) -> dict[str, Any]:
        """`loads` is null where it is not known."""
        said = {"engine": self.engine, "loads": self.loads, "remark": self.remark, "evidence": self.evidence}
        return said | {"sources": [_source(self.engine, path) for path in self.sources]}


def _source(engine: EngineName, path: str) -> dict[str, str]:
    project = PROJECTS[engine]
    return {"repository": project.repository, "path": path, **project.read[path]._asdict()}


def verdicts(layers: Layers) -> list[Verdict]:
    """One verdict per engine."""
    dialect = layers.dialect
    readers = dialect.readers if dialect else rules.PLAIN_READERS
    refusals = [*_refusals(layers), *(dialect.refusals if dialect else ())]
    refusals += [refusal for fmt in layers.distinct for refusal in fmt.refusals()]
    found = [Verdict("quantkit")]
    for engine in rules.OTHERS:
        against = [refusal for refusal in refusals if refusal.engine == engine]
        verdict = _verdict(engine, against, readers.get(engine), dialect)
        advice = DECODE_ZERO_POINTS if verdict.loads and engine == "transformers" and _packs_zero_points(layers) else ""
        found.append(replace(verdict, run=_run(engine, layers), advice=advice))
    return found


def _packs_zero_points(layers: Layers) -> bool:
    return any(isinstance(fmt, CtPacked) and not fmt.sym for fmt in layers.distinct)


def _verdict(engine: EngineName, against: list[Refusal], reader: str | None, dialect: Dialect | None) -> Verdict:
    """What is certain outweighs what is not."""
    decisive = [refusal for refusal in against if refusal.certain]
    if decisive or against:
        reasons = tuple(dict.fromkeys(refusal.reason for refusal in decisive or against))
        sources = tuple(dict.fromkeys(refusal.source for refusal in decisive or against))
        return Verdict(engine, reasons, sources=sources, known=bool(decisive))
    if reader is None:
        return Verdict(engine, (NO_SOURCE,), known=False)
    return Verdict(engine, packages=dialect.packages.get(engine, ()) if dialect else (), sources=(reader,))


def _run(engine: EngineName, layers: Layers) -> Run | None:
    """Of blocks in a GGUF file, a run with all of their types counts: there a layout is a mix of types."""
    blocks = frozenset(fmt.kind for fmt in layers.distinct if isinstance(fmt, Gguf))
    return run_of_blocks(engine, blocks) if blocks else run_of_layout(engine, layout_of(layers))


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


def _refusals(layers: Layers) -> Iterator[Refusal]:
    """What speaks against the layers together."""
    dialect, mixed = layers.dialect, len(layers.distinct) > 1
    if isinstance(dialect, GgufDialect):
        return
    yield from _only_gguf(layers)
    if layers.experts_apart:
        said = "reads all experts of a layer of this family from one tensor, but here they are stored one by one"
        yield from (Refusal(engine, said, models) for engine, models in _MODELS.items())
    elif layers.has_experts and dialect is not None:
        yield from dialect.refusals_of_experts
        if _packs_zero_points(layers):
            said = "does not read zero points of experts; use a symmetric recipe"
            yield Refusal("transformers", said, rules.TRANSFORMERS_CT)
    if mixed and isinstance(dialect, CompressedTensorsDialect):
        yield Refusal("SGLang", "mixed compressed-tensors groups are not fused", rules.SGLANG_CT)
    if isinstance(dialect, GptqDialect):
        yield from _refusals_of_gptq(layers, mixed=mixed)
    if isinstance(dialect, (GptqDialect, AwqDialect)) and (mixed or layers.kept_in_blocks):
        said = "reads one scheme for all layers of GPTQ and AWQ, none left out; convert to compressed-tensors"
        yield Refusal("TGI", said, rules.TGI_METHODS)
    odd = layers.has_experts or mixed or "lm_head" in layers.formats
    if odd and not isinstance(dialect, Mxfp4Dialect):  # which is for experts
        said = "experts, mixed layers and a quantized lm_head were not followed in its sources"
        yield Refusal("TensorRT-LLM", said, rules.TRT_CONFIG, certain=False)
        yield Refusal("TGI", said, rules.TGI_METHODS, certain=False)


# Where families whose experts lie in one tensor are read.
_MODELS: dict[EngineName, str] = {
    "transformers": rules.TRANSFORMERS_MODELS,
    "vLLM": rules.VLLM_MODELS,
    "SGLang": rules.SGLANG_MODELS,
}


def _refusals_of_gptq(layers: Layers, *, mixed: bool) -> Iterator[Refusal]:
    remedy = "convert to compressed-tensors"
    if mixed:
        said = f"ignores GPTQ's per-module rules, so mixed bits load wrong; {remedy}"
        yield Refusal("transformers", said, rules.TRANSFORMERS_GPTQ)
        yield Refusal("vLLM", f"matches GPTQ's per-module rules against fused names; {remedy}", rules.VLLM_GPTQ_NAMES)
    if layers.kept_unevenly:
        said = f"reads one list of quantized layers for all blocks, but here blocks differ; {remedy}"
        yield Refusal("transformers", said, rules.TRANSFORMERS_GPTQ)
    if "lm_head" in layers.formats:
        yield Refusal("transformers", "does not read a quantized lm_head in GPTQ", rules.TRANSFORMERS_GPTQ)


def _only_gguf(layers: Layers) -> Iterator[Refusal]:
    """Programs that read GGUF files, and how to come by one."""
    if all(isinstance(fmt, IntegerFormat) and _fits_blocks(fmt) for fmt in layers.distinct):
        remedy = "`quantkit convert --to gguf` writes one"
    else:
        remedy = "no block holds these codes: `quantkit quantize -r q4_k_m` writes one from the original"
    said = f"not this layout, GGUF files only; {remedy}"
    yield Refusal("llama.cpp", said, rules.LLAMA_CPP_FILES)
    if not layers.formats:
        said = f"folders only for its MLX engine, for some families on some machines; {remedy}"
    yield Refusal("Ollama", said, rules.OLLAMA_IMPORT, certain=bool(layers.formats))


def _fits_blocks(fmt: IntegerFormat) -> bool:
    """As far as the format tells; `convert` looks at the codes."""
    in_groups = fmt.group_size == -1 or fmt.group_size % 32 == 0
    scattered = isinstance(fmt, Gptq) and fmt.act_order
    return fmt.bits in (4, 8) and fmt.sym and in_groups and not scattered and fmt.input_rounding is None
