"""How far `LLM.generate` is: answers done, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]  # called after each step with its new tokens and the answers that ended


@contextmanager
def progress_bar(answers: int) -> Iterator[Advance]:
    """A bar on stderr."""
    from rich import progress as bars  # not on every machine that runs an engine
    from rich.console import Console

    columns = (
        bars.TextColumn("answers"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[speed]}"),
    )
    began, tokens = time.monotonic(), 0
    with bars.Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("answers", total=answers, speed="")

        def advance(new: int, finished: int) -> None:
            nonlocal tokens
            tokens += new
            speed = tokens / max(time.monotonic() - began, 1e-9)
            progress.update(task, advance=finished, speed=f"{speed:,.0f} tokens/s")

        yield advance
