"""What one rank holds of a model that is spread over GPUs, and what its tensor ranks tell each other for a token.

A rank is counted as a smaller model: its part of every linear in the layout of its format, its KV heads, its blocks.
The rules are those of `runtime/parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quantkit.errors import InputError
from quantkit.eval.plan.links import Link
from quantkit.eval.plan.model import Cache, Decoder, block_others, stage_shapes
from quantkit.eval.plan.weights import KEPT_BYTES, Chosen, WeightPlan, weigh_linears
from quantkit.formats import Format, Gptq, Shape
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.ranks import Ranks, local_config

ACTIVATION = 2  # bytes of a number that travels


@dataclass(frozen=True)
class Traffic:
    """What the tensor ranks of one stage exchange in a step; bytes are those of whole tensors, for one token."""

    reduces: int  # all-reduces
    reduced: int  # bytes of all of them together
    gathers: int  # all-gathers, that of the logits not counted
    gathered: int
    logits: int  # bytes of one row; stage 0 only

    def seconds(self, link: Link, tensor: int, tokens: int, rows: int) -> float:
        """Of a step with so many tokens, of which `rows` are sampled."""
        total = self.reduces * link.all_reduce(tokens * self.reduced / max(self.reduces, 1), tensor)
        total += self.gathers * link.all_gather(tokens * self.gathered / max(self.gathers, 1), tensor)
        return total + (link.all_gather(rows * self.logits, tensor) if self.logits else 0.0)

    def sent(self, tensor: int) -> float:
        """Bytes that one GPU sends for one sampled token, around a ring."""
        return (2 * self.reduced + self.gathered + self.logits) * (tensor - 1) / tensor


@dataclass(frozen=True)
class Shard:
    """One rank of one stage: the first, which has most where experts do not divide evenly."""

    ranks: Ranks
    decoder: Decoder  # its sizes: heads, KV heads, channels, blocks
    weights: WeightPlan
    cache: Cache
    traffic: Traffic


@lru_cache(maxsize=64)  # advice asks once more for every GPU and every number of requests
def shard(decoder: Decoder, chosen: Chosen, ranks: Ranks) -> Shard:
    """The part of `ranks.rank`; InputError where a format's groups would be cut apart."""
    config, part = decoder.config, local_config(decoder.config, ranks)
    blocks = ranks.blocks(config.layers)
    linears, traffic = _linears(decoder, chosen, ranks, part)
    others = sum(block_others(part, decoder.raw, layer) for layer in blocks)
    others += config.hidden if ranks.last_stage else 0
    experts = {module: decoder.experts[module] for module in linears if module in decoder.experts}
    local = Decoder(part, decoder.raw, linears, others, experts)
    return Shard(ranks, local, _weigh(local, chosen, ranks), _cache(local), traffic)


def _linears(decoder: Decoder, chosen: Chosen, ranks: Ranks, part: ModelConfig) -> tuple[dict[str, Shape], Traffic]:
    """The linears of this rank's blocks, and what their row-parallel ones exchange.

    What a shared expert gives is added to what experts give before both are summed up.
    """
    config = decoder.config
    linears: dict[str, Shape] = {}
    reduces = gathers = gathered = 0
    for layer, own in zip(ranks.blocks(config.layers), part.stages, strict=True):
        for stage, local in zip(config.stages[layer], own, strict=True):
            modules = ranks.own_modules(stage, config.family.modules(layer, stage))
            linears |= zip(modules, stage_shapes(part, local), strict=True)
            if stage.role not in ("output", "down", "shared_down") or ranks.tensor == 1:
                continue
            if stage.routed:
                reduces += 1
                continue
            (module,) = modules
            fmt, whole = chosen.formats[module], decoder.linears[module]
            if _gathers(fmt, linears[module][1], attention=stage.role == "output"):
                linears[module] = (-(-whole[0] // ranks.tensor), whole[1])
                gathers, gathered = gathers + 2, gathered + whole[0] + whole[1]
            else:
                _check_groups(chosen, module, fmt, whole[1], ranks.tensor)
                reduces += stage.role != "shared_down"
    first = ranks.first_stage and ranks.tensor > 1
    reduces += first  # the embedding
    logits = config.vocab * ACTIVATION if first else 0
    return linears, Traffic(reduces, reduces * config.hidden * ACTIVATION, gathers, gathered * ACTIVATION, logits)


def _gathers(fmt: Format | None, inputs: int, *, attention: bool) -> bool:
    """Whether a row-parallel layer gathers its inputs, because the sum of parts would not be what one GPU computes.

    Scales of rounded inputs cover a whole token; groups scattered by act-order cross heads.
    """
    if isinstance(fmt, Gptq) and fmt.act_order:
        return attention
    return fmt is not None and fmt.needs_all_inputs(inputs)


def _check_groups(chosen: Chosen, module: str, fmt: Format | None, inputs: int, tensor: int) -> None:
    unit = 1 if fmt is None else fmt.input_unit(inputs)
    if inputs % (unit * tensor):
        fitting = [str(count) for count in range(2, tensor) if inputs % (unit * count) == 0]
        remedy = f"use --tensor-parallel {' or '.join(fitting)}" if fitting else "use pipeline parallel"
        raise InputError(
            f"tensor parallel is {tensor}, but {module} as {chosen.name} has {inputs // unit} groups of {unit} inputs, "
            f"which must not be cut apart; {remedy}, or smaller groups"
        )


def _weigh(local: Decoder, chosen: Chosen, ranks: Ranks) -> WeightPlan:
    """Stage 0 has the same rows of embedding and head, which may be one matrix."""
    config, own = local.config, weigh_linears(chosen, local)
    head = ranks.vocabulary_width(config.vocab) * config.hidden if ranks.first_stage else 0
    kept = head + (0 if config.tied else head) + local.other
    operations = {"bf16": 0} | own.operations
    operations["bf16"] += 2 * head
    return WeightPlan(
        name=chosen.name,
        scheme=chosen.scheme,
        bytes=own.bytes + KEPT_BYTES * kept,
        read=own.always_read + KEPT_BYTES * (head + local.other),
        linear_bytes=own.bytes,
        linear_bits=8 * own.bytes / local.linear_weights,
        parameters=local.linear_weights + kept,
        operations=operations,
        head_operations=2 * head,
        routed=own.routed,
    )


def _cache(local: Decoder) -> Cache:
    config = local.config
    kinds, heads, width = config.cache_entry
    formula = f"a latent and its key of {width}" if config.latent else f"{kinds} x {heads} kv heads x {width}"
    return Cache("MLA" if config.latent else "rank", config.kept_numbers, width, config.windows, formula)
