"""Work that may end its process: LLVM does so where AMD's registers cannot hold what inline assembly asks for."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_child(work: Callable[[], T]) -> T:
    """What it returns or raises, from a copy of this process; RuntimeError where the copy ends without either."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            done: tuple[T | None, str] = work(), ""
        except Exception as error:
            done = None, f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "wb") as file:
            pickle.dump(done, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        sent = file.read()
    os.waitpid(child, 0)
    result, error = pickle.loads(sent) if sent else (None, "the compiler ended its process")
    if error:
        raise RuntimeError(error)
    return result  # type: ignore[no-any-return]
