"""Work that goes on behind the caller's: writing what is done while the next thing is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any


class Behind:
    """Does one thing at a time in a thread. The next one waits for it and raises what it raised; so does leaving.

    with Behind() as behind:
        for item in slow_to_make():
            behind.do(slow_to_write, item)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._last: Future[Any] | None = None

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()  # waits, whatever happened
        if error is None:
            self.wait()

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        self.wait()
        self._last = self._thread.submit(work, *arguments)

    def wait(self) -> None:
        """Until it is done; raises what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
