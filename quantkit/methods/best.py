"""Of AWQ, GPTQ and both together, what leaves the outputs of a block nearest to the original's, block by block.

None of the three is best everywhere: scales that suit plain rounding may harm GPTQ, and GPTQ learns a small calibration
text by heart. What each makes of a block is measured on sequences that none of them was fitted to; the one that is
chosen is then fitted to all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quantkit.formats import Format
from quantkit.methods.awq import AwqMethod
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.method import Method, Rounded, ScaleChoice, Tie, require_integer
from quantkit.methods.statistics import InputStatistics

BOTH = "awq+gptq"
CANDIDATES = (BOTH, "awq", "gptq")  # of equal ones the first is taken


def candidate(name: str, damping: float = GptqMethod.damping, target: str = GptqMethod.target) -> Method:
    """One of `CANDIDATES`."""
    if name == "awq":
        return AwqMethod()
    return GptqMethod(damping=damping, scaling="awq" if name == BOTH else "none", target=target)


@dataclass(frozen=True)
class BestMethod(Method):
    """`damping` and `target` are GPTQ's."""

    name: ClassVar[str] = "best"
    damping: float = GptqMethod.damping
    target: str = GptqMethod.target

    def __post_init__(self) -> None:
        self._candidate(BOTH)  # checks them

    def _candidate(self, name: str) -> Method:
        return candidate(name, self.damping, self.target)

    @property
    def candidates(self) -> Mapping[str, Method]:
        return {name: self._candidate(name) for name in CANDIDATES}

    @property
    def wants_drift(self) -> bool:
        return any(each.wants_drift for each in self.candidates.values())

    @property
    def wants_hessian(self) -> bool:
        return True

    @property
    def scales_inputs(self) -> bool:
        return True

    @property
    def searches_grid(self) -> bool:
        return True

    def check(self, fmt: Format) -> None:
        require_integer(self.name, fmt)

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        return self._candidate(BOTH).choose_scales(weight, fmt, inputs, tie)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        """By both: where a single group of layers is looked at, and no block is there to judge by."""
        return self._candidate(BOTH).round(weight, fmt, inputs)

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        """Of all candidates, and once more of the slowest: the chosen one is fitted again."""
        seconds = [each.cost_seconds(group, tokens, speed) for each in self.candidates.values()]
        return sum(seconds) + max(seconds)

    def warnings(self, formats: Collection[Format], widest: int, samples: int, seq_len: int) -> Iterator[str]:
        return self._candidate(BOTH).warnings(formats, widest, samples, seq_len)
