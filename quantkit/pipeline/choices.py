"""Which of a method's candidates made each block, counted for the model card."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

_NUMBER = re.compile(r"\.(\d+)\.")  # of the block that a layer is in


class _Layer(Protocol):
    @property
    def module(self) -> str: ...
    @property
    def log(self) -> Mapping[str, Any]: ...


def describe_choices(layers: Iterable[_Layer]) -> str:
    """One sentence from what a run logged of its layers; empty where there was nothing to choose."""
    chosen = {
        _NUMBER.findall(layer.module)[0]: str(layer.log["chosen"]) for layer in layers if "chosen" in layer.log
    }  # the layers of a block all say the same
    if not chosen:
        return ""
    counted = ", ".join(f"{count} by `{name}`" for name, count in sorted(Counter(chosen.values()).items()))
    return (
        f"Each block was quantized by the candidate that left its outputs nearest to the original's, on calibration "
        f"sequences held back: {counted}. The log has the errors of all."
    )
