"""Which engines load a checkpoint, and why others will not: the rules of each, written down once.

Read from the engines' sources in August 2026 (vLLM, SGLang, transformers 5.22 with gptqmodel, bitsandbytes and
compressed-tensors). A rule is a function that yields the reasons against; no reason means that the engine loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quantkit.formats import Awq, CtFloat8, CtInt8, CtPacked, Format, Gptq, LlmInt8
from quantkit.formats.base import name_in_block
from quantkit.formats.bnb_4bit import Bnb4Bit


@dataclass(frozen=True)
class Layers:
    """What the rules look at: the quantized modules, and the linears of the blocks left unquantized."""

    formats: Mapping[str, Format]
    kept_in_blocks: tuple[str, ...] = ()

    @property
    def kept_unevenly(self) -> bool:
        """Whether some blocks keep a layer that others quantize."""
        quantized = {name_in_block(module) for module in self.formats}
        return not quantized.isdisjoint(name_in_block(module) for module in self.kept_in_blocks)

    @property
    def distinct(self) -> set[Format]:
        return set(self.formats.values())


@dataclass(frozen=True)
class Verdict:
    """Whether one engine loads the checkpoint, with the reasons against or a remark."""

    engine: str
    loads: bool
    remark: str


def verdicts(layers: Layers) -> list[Verdict]:
    """One verdict per engine; a plain checkpoint loads everywhere."""
    return [_verdict(engine, rule, layers) for engine, rule in _RULES.items()]


def _verdict(engine: str, rule: Callable[[Layers], Iterator[str]], layers: Layers) -> Verdict:
    reasons = list(dict.fromkeys(rule(layers)))
    return Verdict(engine, not reasons, "; ".join(reasons) or _needs(engine, layers))


def _needs(engine: str, layers: Layers) -> str:
    """Packages that an engine wants for this kind of checkpoint."""
    kinds = {type(fmt) for fmt in layers.distinct}
    bnb = any(issubclass(kind, Bnb4Bit | LlmInt8) for kind in kinds)
    if engine == "transformers":
        if kinds & {Gptq}:
            return "with gptqmodel and optimum"
        if kinds & {Awq}:
            return "with gptqmodel"
        if bnb:
            return "with bitsandbytes"
        return "with compressed-tensors" if kinds else ""
    return "with vllm-bnb-plugin" if engine == "vLLM" and bnb else ""


def _quantkit(layers: Layers) -> Iterator[str]:
    yield from ()


def _transformers(layers: Layers) -> Iterator[str]:
    gptq = {fmt for fmt in layers.distinct if isinstance(fmt, Gptq)}
    if len(gptq) > 1:
        yield "ignores GPTQ's per-module rules, so mixed bits load wrong; convert to compressed-tensors"
    if gptq and layers.kept_unevenly:
        yield "reads one list of quantized layers for all blocks, but here blocks differ; convert to compressed-tensors"
    if "lm_head" in layers.formats and gptq:
        yield "does not read a quantized lm_head in GPTQ"


def _vllm(layers: Layers) -> Iterator[str]:
    if len({fmt for fmt in layers.distinct if isinstance(fmt, Gptq)}) > 1:
        yield "matches GPTQ's per-module rules against fused names; convert to compressed-tensors"
    for fmt in layers.distinct:
        if isinstance(fmt, Gptq) and not (fmt.sym and fmt.bits in (4, 8)):
            yield f"GPTQ only symmetric at 4 or 8 bits, not {fmt.describe()}; use compressed-tensors or AWQ"
        if isinstance(fmt, Gptq | Awq) and fmt.group_size not in (-1, 32, 64, 128):
            yield f"groups of 32, 64, 128 or a whole row only, not {fmt.group_size}"
        if isinstance(fmt, CtPacked) and not fmt.sym and fmt.bits not in (4, 8):
            yield f"asymmetric compressed-tensors only at 4 or 8 bits, not {fmt.bits}"


def _sglang(layers: Layers) -> Iterator[str]:
    for fmt in layers.distinct:
        if isinstance(fmt, Gptq) and fmt.group_size == -1 and not fmt.sym:
            yield "asymmetric GPTQ needs groups"
        if isinstance(fmt, CtPacked) and fmt.bits not in (4, 8):
            yield f"compressed-tensors weights only at 4 or 8 bits, not {fmt.bits}"
        if isinstance(fmt, CtFloat8 | CtInt8 | CtPacked) and len(layers.distinct) > 1:
            yield "mixed compressed-tensors groups are not fused"


_RULES: dict[str, Callable[[Layers], Iterator[str]]] = {
    "quantkit": _quantkit,
    "transformers": _transformers,
    "vLLM": _vllm,
    "SGLang": _sglang,
}
