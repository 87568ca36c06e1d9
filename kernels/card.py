"""What kernels must know of a GPU: which instructions it has, and how much room.

`card_of` is the one place that asks. Who decides between kernels, or cuts a product into tiles, takes its answer; so
every decision can be made for a card that is not here (`pretend`), as tests do that compile for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

Capability = tuple[int, int]


@dataclass(frozen=True)
class Card:
    name: str
    capability: Capability  # of its instructions: (8, 0) is sm_80
    processors: int
    shared: int  # bytes that one program may have
    shared_of_processor: int  # that all programs of a multiprocessor share
    bandwidth: float  # of its memory, bytes a second, as a data sheet counts

    @property
    def has_bfloat16(self) -> bool:
        """Matrix products of bfloat16, and arithmetic by fused multiply-add."""
        return self.capability >= (8, 0)

    @property
    def adds_bfloat16(self) -> bool:
        """Sums and products of bfloat16 alone, too."""
        return self.capability >= (9, 0)

    @property
    def has_float8(self) -> bool:
        return self.capability >= (8, 9)

    @property
    def has_warpgroups(self) -> bool:
        """wgmma, which is gone from the chips after Hopper."""
        return self.capability == (9, 0)

    @property
    def multiplies_from_shared(self) -> bool:
        """Products take operands from shared memory, so that registers are left for large tiles. Elsewhere, also on the
        consumer's Blackwell, a warp holds everything in its own."""
        return self.capability[0] in (9, 10)

    @property
    def has_tensor_memory(self) -> bool:
        """A memory of its own for the sums of products."""
        return self.capability[0] == 10

    @property
    def chains_launches(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def warps(self) -> int:
        """That a multiprocessor can hold."""
        return 48 if self.capability in ((8, 6), (8, 9), (12, 0)) else 64

    @property
    def target(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


# KiB that one program may have, by capability; a multiprocessor has one more (CUDA's programming guide).
_SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


def absent_card(name: str, capability: Capability, processors: int, bandwidth: float) -> Card:
    """A card that need not be here: the rest follows from its capability."""
    shared = _SHARED[capability]
    return Card(name, capability, processors, shared << 10, (shared + 1) << 10, bandwidth)


NO_GPU = Card("cpu", (0, 0), 4, 227 << 10, 0, 1e11)  # Triton's interpreter takes any tile, and has no shared memory
# One for each kind of instructions, the one with the fewest multiprocessors that is common.
KNOWN = {
    card.target: card
    for card in (
        absent_card("A100", (8, 0), 108, 1555e9),
        absent_card("RTX 3090", (8, 6), 82, 936e9),
        absent_card("L4", (8, 9), 58, 300e9),
        absent_card("H100", (9, 0), 132, 3350e9),
        absent_card("B200", (10, 0), 148, 8000e9),
        absent_card("RTX 5090", (12, 0), 170, 1792e9),
    )
}
# No kernel is compiled for these. People still ask for them, so they are known by the names that `--gpu` takes.
TOO_OLD = {
    "t4": Card("Tesla T4", (7, 5), 40, 64 << 10, 64 << 10, 320e9),
    "v100": Card("Tesla V100-SXM2-16GB", (7, 0), 80, 96 << 10, 96 << 10, 900e9),
}
_pretended: Card | None = None


def card_of(device: torch.device) -> Card:
    return _pretended or _read(device)


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels are chosen for tensors of this device: on a GPU, and wherever a card is pretended."""
    return device.type == "cuda" or pretending()


def pretending() -> bool:
    """Whether the card is one that is not here."""
    return _pretended is not None


@contextmanager
def pretend(card: Card) -> Iterator[None]:
    """Whatever is asked, the answer is this card: to compile for it, or to plan."""
    global _pretended
    before, _pretended = _pretended, card
    try:
        yield
    finally:
        _pretended = before


@cache
def _read(device: torch.device) -> Card:
    if device.type != "cuda":
        return NO_GPU
    found = torch.cuda.get_device_properties(device)
    return Card(
        found.name,
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # not in torch's stubs
        found.shared_memory_per_multiprocessor,
        2e3 * found.memory_clock_rate * found.memory_bus_width / 8,  # kHz, twice a cycle
    )
