"""Every kernel that an engine would be compiled for on a card: those of loading, of a start, and of the rehearsal."""

from __future__ import annotations

from pathlib import Path

import torch

from quantkit.kernels.card import Card
from quantkit.kernels.compiling.recording import Kernel, listing
from quantkit.progress import Progress, silent
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.known_answer import known_ids
from quantkit.runtime.paper.engine import check_paper, paper_engine
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.warm_up import first_parts, rehearse, warm_up


def kernels_of(
    model: str | Path, options: EngineOptions, card: Card, available: int, on_part: Progress = silent
) -> list[Kernel]:
    """In the order in which the engine needs them. `available`: bytes of the card that quantkit may use."""
    check_paper(options)
    torch.set_num_threads(1)
    with listing(card) as kernels:
        engine = paper_engine(model, options, available)
        rehearse(engine, first_parts(engine))
        score_tokens(engine, known_ids(engine))
        warm_up(engine, on_part)
    return kernels
