"""What a run found, as evidence: JSON for programs, a table for readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from compile_matrix.pairs import Result


@dataclass
class Needs:
    """Of one kernel on one card: launches, those that do not compile with the first reason, and the most that one
    takes. What only the tuner tries is not in the most: where it does not fit, it is passed by."""

    launches: int = 0
    failed: int = 0
    error: str = ""
    shared: int = 0
    registers: int = 0
    stack: int = 0

    def __str__(self) -> str:
        if self.failed:
            return f"{self.failed} of {self.launches} fail: {self.error}"
        return f"{self.shared / 1024:.0f} KB, {self.registers}, {self.stack}"


@dataclass
class Report:
    processes: int
    seconds: float = 0.0
    pairs: Counter[str] = field(default_factory=Counter)  # by card, as launches and troubles
    launches: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, dict[str, Needs]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.pairs[result.card] += 1
        self.launches[result.card] += len(result.launches)
        self.failures[result.card] += len(result.troubles)
        self.troubles += result.troubles
        for launch in result.launches:
            needs = self.kernels.setdefault(launch.kernel, {}).setdefault(result.card, Needs())
            needs.launches += 1
            needs.failed += bool(launch.error)
            needs.error = needs.error or launch.error
            if not result.tried:
                needs.shared = max(needs.shared, launch.shared)
                needs.registers = max(needs.registers, launch.registers)
                needs.stack = max(needs.stack, launch.stack)

    def as_json(self) -> dict[str, Any]:
        cards = {
            card: {"pairs": pairs, "launches": self.launches[card], "troubles": self.failures[card]}
            for card, pairs in self.pairs.items()
        }
        kernels = {
            kernel: {card: asdict(needs) for card, needs in by_card.items()}
            for kernel, by_card in sorted(self.kernels.items())
        }
        return {
            "pairs": self.pairs.total(),
            "launches": {kernel: sum(needs.launches for needs in of.values()) for kernel, of in self.kernels.items()},
            "seconds": round(self.seconds, 1),
            "processes": self.processes,
            "cards": cards,
            "kernels": kernels,
            "troubles": sorted(self.troubles),
        }

    def as_table(self) -> str:
        cards = list(self.pairs)
        counts = [[card, self.pairs[card], self.launches[card], self.failures[card]] for card in cards]
        needs = [
            [kernel, *(by_card.get(card, "") for card in cards)] for kernel, by_card in sorted(self.kernels.items())
        ]
        return "\n".join([
            f"{self.pairs.total()} pairs, {self.launches.total()} launches in {self.seconds:.0f} s of {self.processes} "
            f"processes, {len(self.troubles)} troubles",
            "",
            *_rows(["card", "pairs", "launches", "troubles"], counts),
            "",
            "The most that one launch takes: shared memory, registers and bytes of stack of a thread.",
            "",
            *_rows(["kernel", *cards], needs),
            *(["", *sorted(self.troubles)] if self.troubles else []),
        ])  # fmt: skip


def _rows(head: list[str], rows: Iterable[list[Any]]) -> Iterator[str]:
    """In Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
