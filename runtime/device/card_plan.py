"""What the runtime does on a GPU, decided from its card and the formats of a checkpoint before weights are read.

The start of an engine and `quantkit inspect --gpu` both ask here, so that both say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.kernels.card import Card
from quantkit.kernels.linear.arithmetic import rounds_to_float8
from quantkit.kernels.linear.decoded import why_card_decodes
from quantkit.kernels.linear.dispatch import file_name, table_of
from quantkit.runtime.core.kv_dtypes import check_kv_dtype


@dataclass(frozen=True)
class CardPlan:
    """A card that is not refused."""

    card: Card
    warnings: tuple[str, ...]  # a line each: what works, but not as somebody would expect

    @property
    def has_fp8_cache(self) -> bool:
        return self.card.has_float8

    @property
    def has_hopper_kernels(self) -> bool:
        """Kernels of warp groups, for weights of few bits and for prompts; elsewhere plain Triton does the same."""
        return self.card.has_warpgroups

    @property
    def is_measured(self) -> bool:
        """Whether there is a table of the fastest kernels on this GPU; else the card's defaults are taken."""
        return bool(table_of(file_name(self.card.name)))


def small_kv_dtype(card: Card | None, entry: tuple[int, int, int]) -> str | None:
    """The cache in 8 bits of a card, or of a CPU, that a model of this `ModelConfig.cache_entry` can have: int8, which
    loses less than a tenth of what fp8 does and is read as fast, but for latents (docs/explanations/engine.md)."""
    names = ("int8", "fp8") if card is None or card.has_float8 else ("int8",)
    for name in names:
        with suppress(InputError):
            check_kv_dtype(name, entry)
            return name
    return None


def plan_card(
    card: Card,
    formats: Iterable[Format],
    kv_dtype: str = "auto",
    *,
    arithmetic: str | None = None,
    slow_experts: Iterable[str] = (),
) -> CardPlan:
    """Refuses what a GPU cannot do, in a line that says what to do instead.

    `formats`: one for each quantized layer but experts of routed kernels; `slow_experts`: why others have none.
    """
    has = f"{card.name} has compute capability {card.capability[0]}.{card.capability[1]}"
    if not card.has_bfloat16:
        raise InputError(f"{has}, but quantkit's kernels need 8.0 (Ampere) or newer; use --device cpu, or a newer GPU")
    if kv_dtype == "fp8" and not card.has_float8:
        raise InputError(f"{has}, but a cache in FP8 needs 8.9 (Ada) or newer; leave --kv-dtype out")
    formats = list(formats)
    if arithmetic not in (None, "16-bit") and not card.has_float8:
        raise InputError(f"{has}, but arithmetic in FP8 needs 8.9 (Ada) or newer; leave --arithmetic out")
    reasons = Counter(why for fmt in formats if (why := why_card_decodes(fmt, card)) is not None)
    lines = [_decoded(why, layers) for why, layers in reasons.items()]
    in_float8 = sum(map(rounds_to_float8, formats))
    if in_float8 and arithmetic is None and not card.has_float8:
        lines.append(f"{card.name} has no FP8: {in_float8} layers that ask for it are multiplied in 16 bits")
    return CardPlan(card, (*lines, *map(_every_expert, slow_experts)))


def _decoded(why: str, layers: int) -> str:
    return f"{why}: {layers} layers are decoded in every step, which is slow; W8A8, INT8 or INT4 have kernels there"


def _every_expert(why: str) -> str:
    return (
        f"experts have no routed kernel, since {why}: every step computes all of them for every token, which is slow; "
        "experts of one layer in one format have one"
    )
