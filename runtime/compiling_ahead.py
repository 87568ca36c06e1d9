"""A process beside an engine that starts on a GPU: it lists the kernels of that engine and compiles them in parallel,
while the engine reads weights. It imports what it needs while the engine looks at its device.

The engine does not wait for it. It asks Triton's cache for each kernel when it first launches it, and compiles what is
not there: meanwhile the others are made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit.kernels.card import Card
from quantkit.runtime.core.options import EngineOptions


class CompilingAhead:
    """It ends when it is done, when its engine ends, or when it gets no job."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "quantkit.runtime.paper.process"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True
        )

    def begin(self, model: str | Path, options: EngineOptions, card: Card, available: int) -> None:
        """`available`: bytes of the card that quantkit may use."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it has said why it ended
            json.dump(job_of(model, options, card, available), pipe)


def job_of(model: str | Path, options: EngineOptions, card: Card, available: int) -> dict[str, Any]:
    return {"model": str(model), "options": vars(options), "card": vars(card), "available": available}
