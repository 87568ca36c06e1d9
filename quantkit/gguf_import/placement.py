"""Which GGUF tensor, or which rows of one, becomes which weight of the model: names, shapes, rows in another order.

Layers are asked for their stages, as everywhere (`quantkit/stages.py`); here is only what a GGUF file calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.arch import LLAMA, MIXTRAL, Family
from quantkit.errors import InputError
from quantkit.gguf_import.reader import GgufFile
from quantkit.gguf_import.rope import TABLES
from quantkit.stages import Stage

_LINEARS = {  # role of a stage -> names in a GGUF block, for as many linears as it has
    ("qkv", 3): ("attn_q", "attn_k", "attn_v"),
    ("qkv", 1): ("attn_qkv",),
    ("output", 1): ("attn_output",),
    ("gate_up", 2): ("ffn_gate", "ffn_up"),
    ("gate_up", 1): ("ffn_up",),  # gate's rows, then up's
    ("down", 1): ("ffn_down",),
    ("shared_gate_up", 2): ("ffn_gate_shexp", "ffn_up_shexp"),
    ("shared_down", 1): ("ffn_down_shexp",),
}
_PERMUTED = (LLAMA, MIXTRAL)  # whose query and key rows lie in ggml's rotary order


@dataclass(frozen=True)
class Placement:
    """One tensor's way from the file to the model."""

    source: str  # name in the GGUF file
    target: str  # name in the model
    shape: tuple[int, ...]
    permuted_heads: int = 0  # the rows lie in ggml's rotary order within this many heads; 0: in their own order
    expert: int | None = None  # of a source that has all experts of a layer, [experts, ...]
    minus: float = 0.0  # the file has the number plus this: norms of Gemma
    source_shape: tuple[int, ...] = field(default=())  # where it is not `shape`, and no expert's

    @property
    def first_row(self) -> int:
        """Where its rows begin among those of the source."""
        return (self.expert or 0) * self.shape[0]


def placements(file: GgufFile, family: Family, config: dict[str, Any]) -> list[Placement]:
    """Every tensor of the model, in the order of the layers. Raises if the file holds other tensors than these."""
    places = placements_of(family, config)
    _check(file, places)
    return places


def placements_of(family: Family, config: dict[str, Any]) -> list[Placement]:
    """Every tensor that a file of such a model has, but for tables of rope."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    places = [Placement("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config["num_hidden_layers"]):
        places += _Block(layer, family, config).places()
    places.append(Placement("output_norm.weight", "model.norm.weight", (hidden,), minus=family.norm_offset))
    if not config["tie_word_embeddings"]:
        places.append(Placement("output.weight", "lm_head.weight", (vocab, hidden)))
    return places


@dataclass(frozen=True)
class _Block:
    """One layer of a model in a file."""

    layer: int
    family: Family
    config: dict[str, Any]

    def places(self) -> Iterator[Placement]:
        stages = self.family.stages(self.layer, self.config)
        yield from self._norms(stages)
        for stage in stages:
            yield from self._experts(stage) if stage.experts else self._linears(stage)

    def _norms(self, stages: tuple[Stage, ...]) -> Iterator[Placement]:
        hidden, head_dim = self.config["hidden_size"], self.config["head_dim"]
        attention, mlp = (next(stage.part for stage in stages if stage.part.kind == kind) for kind in _KINDS)
        names = {"attn_norm": attention.norm, "ffn_norm": mlp.norm}
        names |= {"post_attention_norm": attention.post_norm or "", "post_ffw_norm": mlp.post_norm or ""}
        sizes = [(source, target, hidden) for source, target in names.items() if target]
        if self.family.qk_norm:
            sizes += [(f"attn_{part}_norm", f"self_attn.{part}_norm", head_dim) for part in ("q", "k")]
        for source, target, size in sizes:
            yield self._place(f"{source}.weight", f"{target}.weight", (size,), minus=self.family.norm_offset)

    def _linears(self, stage: Stage) -> Iterator[Placement]:
        biased = self.family.biased(self.layer, self.config)
        outputs, inputs = self._sizes(stage)
        names = zip(_LINEARS[stage.role, len(stage.names)], stage.names, outputs, strict=True)
        for source, target, rows in names:
            permuted = self.family in _PERMUTED and source in ("attn_q", "attn_k")
            heads = rows // self.config["head_dim"] if permuted else 0
            yield self._place(f"{source}.weight", f"{target}.weight", (rows, inputs), permuted_heads=heads)
            if target in biased:
                yield self._place(f"{source}.bias", f"{target}.bias", (rows,), permuted_heads=heads)
        if stage.gate is not None and stage.role == "shared_gate_up":
            yield self._place("ffn_gate_inp_shexp.weight", f"{stage.gate}.weight", (1, inputs), source_shape=(inputs,))

    def _experts(self, stage: Stage) -> Iterator[Placement]:
        """Those of a layer lie in one tensor, and so do all of its routers' rows."""
        assert stage.experts is not None
        outputs, inputs = self._sizes(stage)
        for source, target, rows in zip(_LINEARS[stage.role, len(stage.names)], stage.names, outputs, strict=True):
            for number in range(stage.experts.count):
                name = f"{target.format(number)}.weight"
                yield self._place(f"{source}_exps.weight", name, (rows, inputs), expert=number)
        if stage.role == "gate_up":
            shape = (stage.experts.count, inputs)
            yield self._place("ffn_gate_inp.weight", f"{stage.experts.router}.weight", shape)

    def _place(self, source: str, target: str, shape: tuple[int, ...], **options: Any) -> Placement:
        return Placement(f"blk.{self.layer}.{source}", f"{self.family.blocks}.{self.layer}.{target}", shape, **options)

    def _sizes(self, stage: Stage) -> tuple[tuple[int, ...], int]:
        """Outputs of each linear of a stage, or of all together where they are fused; and their inputs."""
        config, hidden = self.config, self.config["hidden_size"]
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        width = stage.width or config["intermediate_size"]
        outputs, inputs = {
            "qkv": ((queries, keys, keys), hidden),
            "output": ((hidden,), queries),
            "gate_up": ((width, width), hidden),
            "down": ((hidden,), width),
        }[stage.role.removeprefix("shared_")]
        return outputs if len(outputs) == len(stage.names) else (sum(outputs),), inputs


_KINDS = ("attention", "mlp")


def _check(file: GgufFile, places: Sequence[Placement]) -> None:
    """Nothing missing, nothing left over, every shape as expected."""
    missing = [place.source for place in places if place.source not in file.tensors]
    if missing:
        raise InputError(
            f"{file.path} lacks {len(missing)} of {len(places)} tensors, the first is {missing[0]}; "
            "the file is incomplete, get it again"
        )
    surplus = set(file.tensors) - {place.source for place in places} - set(TABLES)
    if surplus:
        raise InputError(
            f"{file.path}: tensor {min(surplus)} has no place in a {file.architecture} model; not supported"
        )
    counts = {place.source: place.expert + 1 for place in places if place.expert is not None}
    for place in places:
        whole = place.source_shape or place.shape
        if place.expert is not None:
            whole = (counts[place.source], *place.shape)
        if file.shape(place.source) != whole:
            raise InputError(
                f"{file.path}: tensor {place.source} has shape {list(file.shape(place.source))}, "
                f"but the metadata asks for {list(whole)}; get the file again"
            )
