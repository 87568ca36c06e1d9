"""Room for requests: how many answers are computed or wait at a time, and who is refused."""

from __future__ import annotations

from quantkit.runtime.server.errors import ApiError

QUEUE_FULL = "queue_full"  # the code of a refusal for want of room


class AdmissionQueue:
    """Room for answers: as many as the engine computes at once, and those that may wait for it."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._room = at_once + waiting
        self.taken = 0

    def enter(self, answers: int) -> Ticket:
        """Room until it is left. A request that is larger than all the room may pass when nobody else is there."""
        if self.taken and self.taken + answers > self._room:
            raise ApiError(
                429,
                f"{self.taken} answers are being computed or wait, and {self._room} is the limit; try again later",
                code=QUEUE_FULL,
                headers={"Retry-After": "1"},
            )
        return Ticket(self, answers)


class Ticket:
    """What a request holds of the queue; leaving twice is leaving once."""

    def __init__(self, queue: AdmissionQueue, answers: int) -> None:
        self._queue = queue
        self._answers = answers
        queue.taken += answers

    def leave(self) -> None:
        self._queue.taken -= self._answers
        self._answers = 0
