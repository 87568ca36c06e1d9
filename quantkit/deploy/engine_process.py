"""The engine process of a replica with several ranks: `python -m quantkit.deploy.engine_process FD ASKS HOST`.

It is rank 0 and no part of Ray, so its replica starts the other ranks for it. They talk over the socket ASKS:

    to the replica     {"start": [job, ...]}, {"stop": true}
    from the replica   {"ended": {"rank", "why"}}, {"stopped": true}
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Sequence

from quantkit.runtime.core import framing
from quantkit.runtime.parallel.launcher import Job
from quantkit.runtime.server.engine_process import process

STOP_SECONDS = 10.0


class ReplicaLauncher:
    """A `Launcher` that asks the replica."""

    devices = None  # Ray has placed the ranks where their devices are

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.host = host
        self._connection = connection
        self._started: list[int] = []
        self._ended: dict[int, str] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, jobs: Sequence[Job]) -> None:
        self._started = [job.ranks.rank for job in jobs]
        self._connection.sendall(framing.pack_message({"start": [job.to_json() for job in jobs]}))

    def check(self) -> dict[int, str]:
        return dict(self._ended)

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # a replica that is gone has taken them along
            self._connection.sendall(framing.pack_message({"stop": True}))
            self._stopped.wait(STOP_SECONDS)

    def _read(self) -> None:
        while (message := framing.read_message(self._connection)) is not None:
            if "ended" in message:
                self._ended[message["ended"]["rank"]] = message["ended"]["why"]
            else:
                self._stopped.set()
        for rank in self._started:
            self._ended.setdefault(rank, "the replica that started it is gone")
        self._stopped.set()


def main(descriptor: int, asks: int, host: str) -> None:
    launcher = ReplicaLauncher(socket.socket(fileno=asks), host)
    process.main(descriptor, launcher)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
