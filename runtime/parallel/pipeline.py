"""What the ranks exchange while they compute: sums within a stage, hidden states from stage to stage.

A stage sends without waiting, and waits only for the stage before it. The first stage waits for the rows of a step that
it has sent on, and has asked for them before it sends anything else. So nobody waits in a circle, however many steps
are on their way.

The process groups are ours alone: torch's default group stays free, and a process may have several engines.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.model.tensor_group import Group, OneRank, TorchGroup

PATIENCE = timedelta(minutes=10)  # for a rank that lives and does not answer; one that died is noticed at once
_TAG = 1


@dataclass(frozen=True)
class ReceivedRows:
    """Rows of hidden states on their way back to the first stage."""

    hidden: Tensor
    _work: Work

    def wait(self) -> Tensor:
        self._work.wait()
        return self.hidden


class Pipeline:
    """One rank's place among the others: the tensor ranks of its stage, the stage before and the one after it. Made by
    all ranks at the same time."""

    def __init__(
        self, ranks: Ranks, store: Store, host: str, device: torch.device, hidden: int, dtype: torch.dtype
    ) -> None:
        """`host` is this rank's own address, as others reach it; `hidden` and `dtype` are the hidden states'."""
        self.ranks = ranks
        self._device = device
        self._width = hidden
        self._dtype = dtype
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._groups: list[Any] = []
        self._store, self._host = store, host
        self.group: Group = OneRank()
        if ranks.tensor > 1:
            self.group = self._tensor_group()
        if ranks.pipeline > 1:
            self._forward = self._backend("forward", ranks.rank, ranks.world)
            self._back = self._backend("back", ranks.rank, ranks.world)

    def send_on(self, hidden: Tensor) -> None:
        """To the next stage."""
        self._send(self._forward, hidden, self.ranks.rank + self.ranks.tensor)

    def receive(self, tokens: int) -> Tensor:
        """From the stage before."""
        hidden = self._empty(tokens)
        self._forward.recv([hidden], self.ranks.rank - self.ranks.tensor, _TAG).wait()
        return hidden

    def send_back(self, rows: Tensor) -> None:
        """From the last stage to the first."""
        self._send(self._back, rows, self.ranks.tensor_rank)

    def expect(self, rows: int) -> ReceivedRows:
        """In the order in which the last stage sends them."""
        hidden = self._empty(rows)
        last = (self.ranks.pipeline - 1) * self.ranks.tensor + self.ranks.tensor_rank
        return ReceivedRows(hidden, self._back.recv([hidden], last, _TAG))

    def abort(self) -> None:
        """Frees whoever waits for a rank that is gone. Between CPUs a closed connection does it."""
        if self._device.type == "cuda":
            for group in self._groups:
                group.abort()

    def _send(self, group: Any, hidden: Tensor, to: int) -> None:
        """Holds what is sent until it has arrived, and never very much."""
        hidden = hidden.contiguous()
        self._sent.append((group.send([hidden], to, _TAG), hidden))
        while len(self._sent) > 2 * self.ranks.pipeline:
            self._sent.popleft()[0].wait()

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(rows, self._width, dtype=self._dtype, device=self._device)

    def _tensor_group(self) -> TorchGroup:
        rank, size = self.ranks.tensor_rank, self.ranks.tensor
        name = f"stage {self.ranks.stage}"
        backend = self._backend(name, rank, size)
        group = dist.ProcessGroup(PrefixStore(f"{name} group", self._store), rank, size)
        kinds = dist.ProcessGroup.BackendType
        kind = kinds.NCCL if self._device.type == "cuda" else kinds.GLOO
        group._register_backend(self._device, kind, backend)
        return TorchGroup(group, rank, size)

    def _backend(self, name: str, rank: int, size: int) -> Any:
        """One for each purpose: what goes forward must not wait behind what comes back."""
        store = PrefixStore(name, self._store)
        if self._device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = PATIENCE
            made: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = PATIENCE
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            made = dist.ProcessGroupGloo(store, rank, size, gloo)
        self._groups.append(made)
        return made


def make_store(host: str, port: int, *, first: bool) -> Any:
    """Where ranks find each other; the first one makes it, on a free port where that is 0."""
    given: dict[str, Any] = {"is_master": first, "timeout": PATIENCE, "wait_for_workers": False}
    if first:  # torch itself would listen on every interface
        listening = socket.create_server((host, port))
        port, given["master_listen_fd"] = listening.getsockname()[1], listening.detach()
    return dist.TCPStore(host, port, **given)  # type: ignore[attr-defined]
