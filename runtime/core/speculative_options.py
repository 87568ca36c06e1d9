"""What `--speculative` says: who guesses, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.core.step_plan import MOST_GUESSES

_DEFAULTS = {"ngram": 8, "draft": 4, "self": 4, "medusa": 15, "eagle": 4}  # kind -> guesses
_EXAMPLES = "such as ngram,k=8 or draft=PATH,k=4 or self=nf4 or medusa=PATH or eagle=PATH"


@dataclass(frozen=True)
class SpeculativeOptions:
    kind: str  # of _DEFAULTS
    most: int  # guesses in one step
    what: str = ""  # the path of a draft model or of heads, or the recipe of the model's own draft
    adaptive: bool = True  # as many guesses as pay, up to `most`; else always `most`

    @classmethod
    def parse(cls, text: str) -> SpeculativeOptions:
        """From `ngram`, `ngram,k=8`, `draft=PATH,k=4` or `self=RECIPE`; `adaptive=off` keeps the number of guesses."""
        first, *rest = (part.strip() for part in text.split(","))
        kind, _, what = first.partition("=")
        if kind not in _DEFAULTS:
            raise InputError(f"speculative is '{text}', {_EXAMPLES}: {did_you_mean(kind, _DEFAULTS)}")
        if (kind != "ngram") != bool(what):
            raise InputError(f"speculative is '{text}', but must be {_EXAMPLES}")
        most, adaptive = _DEFAULTS[kind], True
        for part in rest:
            name, _, value = part.partition("=")
            if name == "k":
                if not value.isdecimal() or not 1 <= int(value) <= MOST_GUESSES:
                    raise InputError(f"speculative is '{text}': k must be a whole number from 1 to {MOST_GUESSES}")
                most = int(value)
            elif name == "adaptive":
                if value not in ("on", "off"):
                    raise InputError(f"speculative is '{text}': adaptive must be on or off")
                adaptive = value == "on"
            else:
                raise InputError(f"speculative is '{text}': unknown setting '{name}'; known: k, adaptive")
        return cls(kind, most, what, adaptive)
