"""Round to nearest: each weight by itself. Needs no data and works with every format."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quantkit.formats import Format, IntegerFormat
from quantkit.methods.method import Method, Rounded
from quantkit.methods.statistics import InputStatistics


@dataclass(frozen=True)
class RtnMethod(Method):
    """Plain rounding has no options."""

    name: ClassVar[str] = "rtn"

    @property
    def calibrated(self) -> bool:
        return False

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        return Rounded(fmt.quantize(weight))

    def warnings(self, formats: Collection[Format], widest: int, samples: int, seq_len: int) -> Iterator[str]:
        if all(isinstance(fmt, IntegerFormat) and fmt.bits == 2 for fmt in formats):
            yield "plain rounding to 2 bits leaves a model that writes nonsense; use method gptq"
