"""What runner and engine ask of the other ranks of a model: `Peers`, and `Alone` where there are none.

The other ranks compute their parts of every step, so they hear of it first. With several stages, what this rank's
blocks leave goes on to the next stage, and the rows that are wanted come back from the last one. The real peers stand
in `runtime/parallel/`; nothing below it knows how ranks are reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from quantkit.runtime.device.step_inputs import PageMoves, Step
from quantkit.runtime.model.decoder import AnyDecoder, Decoder


class ReturningRows(Protocol):
    """Hidden states of a step on their way through the other stages."""

    def wait(self) -> Tensor:
        """Those rows of the step that are wanted, [rows, hidden]. Steps are waited for in their order."""


class Peers(Protocol):
    @property
    def weights(self) -> Sequence[int]:
        """Bytes of the weights that each rank loaded, this one's first; empty where there is no other."""

    def coordinated(self, own: Decoder) -> AnyDecoder:
        """This rank's decoder for what is computed beside the scheduler's steps: all ranks take part."""

    def guarded(self) -> AbstractContextManager[None]:
        """For what all ranks compute together. An error in it leaves them out of step, so it ends them."""

    def tell_moves(self, moves: PageMoves) -> None:
        """Pages change hands."""

    def tell_step(self, step: Step) -> None:
        """A step begins."""

    def tell_kept(self, sources: list[int], targets: list[int]) -> None:
        """Keys and values of single tokens move, from KV slot to KV slot."""

    def tell_centring(self) -> None:
        """The next batch beside the scheduler's steps is the one that centres of keys are measured by."""

    def capturing(self, sequences: int, new: int, tree: bool) -> AbstractContextManager[None]:
        """Around the capture of a graph of this size: it holds sums over all ranks, so all make it at that time."""

    def send_on(self, hidden: Tensor | None, num_rows: int) -> ReturningRows | None:
        """What this rank's blocks left of a step, of which so many rows are wanted, to the next stage; None where
        these blocks were the last."""

    def idle_shares(self, busy_seconds: float) -> tuple[float, ...]:
        """Of every stage since the last call, the time in which it did not compute; this rank did for so long. Empty
        where there is one stage."""

    def check(self) -> None:
        """Raises the reason where another rank has died."""

    def when_broken(self, call: Callable[[], None]) -> None:
        """`call` is called, from another thread, when another rank has died."""

    def stop(self) -> None:
        """Ends the other ranks. May be called again."""


class Alone:
    """No other rank: nobody is told, nothing travels."""

    weights: Sequence[int] = ()

    def coordinated(self, own: Decoder) -> AnyDecoder:
        return own

    def guarded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tell_moves(self, moves: PageMoves) -> None:
        pass

    def tell_step(self, step: Step) -> None:
        pass

    def tell_kept(self, sources: list[int], targets: list[int]) -> None:
        pass

    def tell_centring(self) -> None:
        pass

    def capturing(self, sequences: int, new: int, tree: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def send_on(self, hidden: Tensor | None, num_rows: int) -> ReturningRows | None:
        return None

    def idle_shares(self, busy_seconds: float) -> tuple[float, ...]:
        return ()

    def check(self) -> None:
        pass

    def when_broken(self, call: Callable[[], None]) -> None:
        pass

    def stop(self) -> None:
        pass
