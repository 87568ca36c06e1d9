"""Several models on the same devices: how much each engine takes, decided before any of them is loaded.

Weights, activations and graphs by need. What is left of a device goes to the caches, in equal bytes or in the parts
that were asked for; a cache never gets more than its model could use, nor less than its longest context where that was
set, and what one does not take, the others get. An engine is then told a number of tokens, so the order of starts is no
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.runtime.device.memory import MemoryPlan

GPU_PROCESS = 512 << 20  # bytes of a GPU that a process takes by being there; the plan of a single engine measures it
_REMEDIES = (
    "Serve fewer, lower --max-context, --kv-tokens, --max-sequences or --step-tokens, use --kv-dtype int8, raise "
    "--memory-share, or quantize to fewer bits"
)


@dataclass(frozen=True)
class MemoryNeed:
    """What an engine asks for. `most` is its plan on a device without an end, `pages` its smallest cache."""

    name: str
    device: str
    most: MemoryPlan
    pages: int
    part: float = 1.0  # of what is left, compared with those of the others

    @property
    def fixed(self) -> int:
        process = GPU_PROCESS if self.device.startswith("cuda") else 0
        return self.most.weights + self.most.activations + self.most.graphs + process

    @property
    def page_bytes(self) -> int:
        return self.most.page_bytes + self.most.draft_page_bytes

    @property
    def least(self) -> int:
        """Bytes of the smallest cache."""
        return self.pages * self.page_bytes

    def cache(self, level: float) -> int:
        """Bytes, where a part is worth so many."""
        return int(min(self.most.cache, max(self.least, level * self.part)))


@dataclass(frozen=True)
class MemoryShare:
    """What an engine gets, in bytes and tokens."""

    name: str
    device: str
    weights: int
    activations: int
    graphs: int
    cache: int
    kv_tokens: int
    max_context: int
    available: int  # on the device, for all its engines

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.cache


def split_memory(needs: Sequence[MemoryNeed], available: int) -> list[MemoryShare]:
    """The shares of the engines of one device; raises InputError, with the numbers, where they do not fit together."""
    left = available - sum(need.fixed for need in needs)
    if left < sum(need.least for need in needs):
        raise InputError(_shortage(needs, available))
    level = _level(needs, left)
    shares = []
    for need in needs:
        pages = need.cache(level) // need.page_bytes
        tokens = (pages - 1) * need.most.page_size
        share = MemoryShare(
            name=need.name,
            device=need.device,
            weights=need.most.weights,
            activations=need.most.activations,
            graphs=need.most.graphs,
            cache=pages * need.page_bytes,
            kv_tokens=tokens,
            max_context=min(need.most.max_context, tokens),
            available=available,
        )
        shares.append(share)
    return shares


def _level(needs: Sequence[MemoryNeed], left: int) -> float:
    """The most that a part can be worth while all caches together take no more than what is left."""
    low, high = 0.0, left / min(need.part for need in needs)
    for _ in range(100):  # halves the distance each time
        middle = (low + high) / 2
        if sum(need.cache(middle) for need in needs) <= left:
            low = middle
        else:
            high = middle
    return low


def _shortage(needs: Sequence[MemoryNeed], available: int) -> str:
    each = ", ".join(
        f"{need.name} {human_bytes(need.fixed + need.least)} (weights {human_bytes(need.most.weights)})"
        for need in needs
    )
    total = sum(need.fixed + need.least for need in needs)
    return (
        f"the models do not fit together on {needs[0].device}: {each}; {human_bytes(total)} with the smallest caches, "
        f"but {human_bytes(available)} may be used. {_REMEDIES}"
    )


def as_table(shares: Sequence[MemoryShare]) -> str:
    """For people, one line an engine."""
    head = ("model", "device", "weights", "activations", "graphs", "cache", "cache tokens", "longest context", "share")
    rows: list[tuple[str, ...]] = [head]
    for share in shares:
        sizes = (share.weights, share.activations, share.graphs, share.cache)
        counts = (f"{share.kv_tokens:,}", f"{share.max_context:,}", f"{100 * share.total / share.available:.1f} %")
        rows.append((share.name, share.device, *(human_bytes(size) for size in sizes), *counts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        left = [row[column].ljust(widths[column]) for column in (0, 1)]
        right = [row[column].rjust(widths[column]) for column in range(2, len(head))]
        lines.append("  ".join([*left, *right]).rstrip())
    usable = {share.device: share.available for share in shares}
    lines.append("may be used: " + ", ".join(f"{human_bytes(size)} on {device}" for device, size in usable.items()))
    return "\n".join(lines)
