"""Rank 0's side: it waits for the other ranks, tells them every step, and notices when one of them is gone.

A rank that dies closes its connection. Rank 0 may be waiting for that rank's part of a sum at the time; between CPUs
the wait ends because the ranks' own connections close too, between GPUs because the groups are aborted. Then all other
ranks are ended, and everything that is asked of the engine fails with the reason.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.parallel.channel import Channel, Kind, Lists, Talk, pack, unpack_talk
from quantkit.runtime.parallel.door import Door, new_token
from quantkit.runtime.parallel.launcher import Address, Job, Launcher

_CAUSE_SECONDS = 1.0  # to wait for the death behind an error that another rank's death has caused
_NOTICE_SECONDS = 4.0  # to wait for the death that explains an error of our own
_HELLO_SECONDS = 300.0  # for all ranks to come; Python and torch may have to be read from a slow disk
_START_SECONDS = 3600.0  # for a rank to load


@dataclass(frozen=True)
class _Death:
    rank: int
    reason: str
    lost: bool = False  # another rank, so this one is not the cause
    code: int = 1


class Coordinator:
    def __init__(self, ranks: Ranks, launcher: Launcher, model: str, options: EngineOptions) -> None:
        """Starts the other ranks and returns at once; `gather` waits for them."""
        self.ranks = ranks
        self.launcher = launcher
        self._channels: dict[int, Channel] = {}
        self._heard: queue.Queue[tuple[int, Talk]] = queue.Queue()
        self._deaths: queue.Queue[_Death | None] = queue.Queue()
        self._over = threading.Event()
        self._error: QuantkitError | None = None
        self._listeners: list[Callable[[], None]] = []
        self._stopping = False
        token = new_token()
        self._door = Door(launcher.host, token)
        self.address = Address(launcher.host, self._door.port, token)
        others = [replace(ranks, rank=rank) for rank in range(1, ranks.world)]
        launcher.start([Job(other, self.address, model, options) for other in others])
        threading.Thread(target=self._watch, daemon=True).start()

    def gather(self) -> None:
        """Waits until every rank has called."""
        end = time.monotonic() + _HELLO_SECONDS
        while len(self._channels) < self.ranks.world - 1:
            ended = self.launcher.check()
            for rank, reason in ended.items():
                self._deaths.put(_Death(rank, reason))
            self.check(wait=bool(ended))
            if time.monotonic() > end:
                raise QuantkitError(f"the other ranks did not call within {_HELLO_SECONDS:.0f} s; start again")
            for rank, connection in self._door.wait(0.1).items():
                self._channels[rank] = channel = Channel(connection)
                threading.Thread(target=self._listen, args=(rank, channel), daemon=True).start()
        self._door.close()

    def say(self, talk: Talk) -> None:
        for channel in list(self._channels.values()):
            with suppress(OSError):  # it is gone, and the one who listens to it has seen that
                channel.say(talk)

    def hear(self, about: str) -> dict[int, Any]:
        """What every rank has to say about this; raises where one has died."""
        found: dict[int, Any] = {}
        end = time.monotonic() + _START_SECONDS
        while len(found) < self.ranks.world - 1:
            self.check()
            if time.monotonic() > end:
                raise QuantkitError(f"ranks did not answer within {_START_SECONDS:.0f} s; start again")
            with suppress(queue.Empty):
                rank, talk = self._heard.get(timeout=0.1)
                if about in talk:
                    found[rank] = talk[about]
        return found

    def send(self, kind: Kind, lists: Lists, *, first_stage: bool = False) -> None:
        """The same to all ranks, or to those of the first stage."""
        body = pack(lists)
        for rank, channel in self._channels.items():
            if not first_stage or rank < self.ranks.tensor:
                with suppress(OSError):
                    channel.send(kind, body)

    def busy_seconds(self) -> dict[int, float]:
        """How long each of the other ranks has computed since the last call."""
        self.send(Kind.REPORT, [])
        return self.hear("busy")

    def check(self, wait: bool = False) -> None:
        """Raises the reason where a rank has died."""
        if wait:
            self._over.wait(_NOTICE_SECONDS)
        if self._error is not None:
            raise self._error

    def when_broken(self, call: Callable[[], None]) -> None:
        """`call` is called from another thread when a rank has died."""
        self._listeners.append(call)
        if self._over.is_set():
            call()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """For what all ranks compute together. An error in it leaves them out of step, so it ends them."""
        self.check()
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError) and self._over.wait(_NOTICE_SECONDS) and self._error is not None:
                raise self._error from error
            self._deaths.put(_Death(0, f"{type(error).__name__}: {error}"))
            self._over.wait(_NOTICE_SECONDS)
            raise

    def run_beside(self, work: Callable[[], Any]) -> Any:
        """The result of something that waits for all ranks; ends when one of them dies meanwhile."""
        found: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            self.check()
            thread.join(0.05)
        if errors:
            self.check(wait=True)
            raise errors[0]
        return found[0]

    def stop(self) -> None:
        """Ends the other ranks. May be called again."""
        self._stopping = True
        self.send(Kind.STOP, [])
        self._deaths.put(None)
        self._door.close()
        self.launcher.stop()
        for channel in self._channels.values():
            channel.close()

    def _listen(self, rank: int, channel: Channel) -> None:
        """Until the rank is gone."""
        while (frame := channel.read()) is not None:
            talk = unpack_talk(frame[1])
            if "failed" in talk:
                self._deaths.put(_Death(rank, talk["failed"], talk["lost"], talk["code"]))
                return
            self._heard.put((rank, talk))
        self._deaths.put(_Death(rank, self._reason(rank)))

    def _reason(self, rank: int) -> str:
        end = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < end and not self._stopping:
            if (reason := self.launcher.check().get(rank)) is not None:
                return reason
            time.sleep(0.01)
        return "its connection closed"

    def _watch(self) -> None:
        """Waits for a death, finds the one behind it, and ends what is left."""
        deaths = [self._deaths.get()]
        end = time.monotonic() + _CAUSE_SECONDS
        while all(death is not None and death.lost for death in deaths) and time.monotonic() < end:
            with suppress(queue.Empty):
                deaths.append(self._deaths.get(timeout=0.05))
        if self._stopping or None in deaths:
            return
        first = next((death for death in deaths if death is not None and not death.lost), deaths[0])
        assert first is not None
        self._error = self._as_error(first)
        self._over.set()
        for channel in self._channels.values():
            channel.close()
        for call in self._listeners:
            call()
        self.launcher.stop()

    def _as_error(self, death: _Death) -> QuantkitError:
        place = f"rank {death.rank} of {self.ranks.world}"
        if death.code == InputError.exit_code:
            return InputError(f"{death.reason} (says {place})")
        return QuantkitError(f"{place} died: {death.reason}; all ranks have ended, start the engine again")
