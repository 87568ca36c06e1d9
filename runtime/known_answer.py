"""What an engine must still say after a fault: the logits of a few tokens, as it computed them when it started."""

from __future__ import annotations

import torch

from quantkit.errors import QuantkitError
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.scoring import score_tokens

TOKENS = 8
ALLOWED = 0.02  # of the logits' norm: in 16 bits, a step of another size rounds otherwise


def known_ids(engine: Engine) -> torch.Tensor:
    """The tokens, spread over the vocabulary."""
    return torch.arange(1, min(TOKENS, engine.memory.max_context) + 1) * 7919 % engine.config.vocab


class KnownAnswer:
    def __init__(self, engine: Engine) -> None:
        """Takes pages while it computes, and gives them back: call it when the engine has some to spare."""
        self._engine = engine
        self._ids = known_ids(engine)
        self._logits = self._answer()

    def check(self) -> None:
        """Raises QuantkitError where the engine says something else now."""
        found = self._answer()
        difference = (found - self._logits).norm() / self._logits.norm()
        if not float(difference) < ALLOWED:  # NaN is not
            raise QuantkitError("the engine does not compute what it computed when it started")

    def _answer(self) -> torch.Tensor:
        return score_tokens(self._engine, self._ids).float().cpu()
