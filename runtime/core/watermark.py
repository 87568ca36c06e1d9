"""What a request says about the watermark of its answer: whose it is, and how strong."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from quantkit.errors import InputError

GAMMA, DELTA = 0.25, 2.0  # those of the paper's experiments
MOST_DELTA = 100.0


@dataclass(frozen=True)
class Watermark:
    """Behind every token, a share `gamma` of all tokens is green, and `delta` is added to their logits. Which ones are
    green only those can tell who know `key` (`sampling/watermark.py`)."""

    key: str = field(repr=False)  # a secret text: no log may show it
    gamma: float = GAMMA
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise InputError("watermark key is empty or no text; give the secret that detects the watermark later")
        check_gamma(self.gamma)
        if not _is_number(self.delta) or not 0 < self.delta <= MOST_DELTA:
            raise InputError(
                f"watermark delta is {self.delta!r}, but must be a number above 0 and at most {MOST_DELTA:g}"
            )

    @property
    def seed(self) -> int:
        return key_seed(self.key)


def check_gamma(gamma: object) -> None:
    if not _is_number(gamma) or not 0.01 <= gamma <= 0.99:  # type: ignore[operator]
        raise InputError(f"watermark gamma is {gamma!r}, but must be a number from 0.01 to 0.99")


def key_seed(key: str) -> int:
    """64 bits of a key's SHA-256, as a signed number."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
