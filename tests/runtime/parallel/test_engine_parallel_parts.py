"""What ranks say to each other, how steps are divided among stages, and who may call rank 0."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence as Continuation
from quantkit.runtime.device.model_part import BusyClock
from quantkit.runtime.device.step_inputs import PageMoves, Step, StepInputs
from quantkit.runtime.engine.page_pool import PagePool
from quantkit.runtime.engine.scheduler import Limits, Scheduler
from quantkit.runtime.model.batch import Batch
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.parallel.channel import Channel, Kind, pack, unpack
from quantkit.runtime.parallel.coordinator import Coordinator
from quantkit.runtime.parallel.door import greet, new_token
from quantkit.runtime.parallel.launcher import Address, Job
from quantkit.runtime.parallel.peer_ranks import bubble
from quantkit.runtime.parallel.step_message import (
    batch_from_lists,
    batch_to_lists,
    moves_from_lists,
    moves_to_lists,
    step_from_lists,
    step_to_lists,
)

numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
pages = st.lists(st.integers(1, 9), max_size=3)


@given(st.lists(numbers, max_size=6))
def test_lists_arrive_as_they_were(lists: list[list[int]]) -> None:
    assert unpack(pack(lists)) == lists


@given(numbers, numbers, st.lists(numbers, min_size=9, max_size=9), st.booleans())
def test_steps_arrive_as_they_were(index: list[int], changed: list[int], inputs: list[list[int]], every: bool) -> None:
    step = Step(StepInputs(*inputs), index, changed, every)
    assert step_from_lists(unpack(pack(step_to_lists(step)))) == step
    assert step.wanted == (list(range(len(inputs[0]))) if every else inputs[6])


@given(
    numbers,
    st.lists(st.tuples(st.integers(0, 9), pages), max_size=3),
    st.lists(st.tuples(st.integers(0, 9), pages), max_size=3),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3),
)
def test_moves_arrive_as_they_were(
    dropped: list[int],
    out: list[tuple[int, list[int]]],
    back: list[tuple[int, list[int]]],
    copies: list[tuple[int, int]],
) -> None:
    moves = PageMoves(dropped, out, back, copies)
    assert moves_from_lists(unpack(pack(moves_to_lists(moves)))) == moves
    assert bool(moves) == bool(dropped or out or back or copies)


@pytest.mark.parametrize("ancestors", [None, torch.tensor([1, 3, 5])])
def test_batches_arrive_as_they_were(ancestors: torch.Tensor | None) -> None:
    table = torch.tensor([[4, 2], [7, 0]], dtype=torch.int32)
    lengths, starts = (torch.tensor(values, dtype=torch.int32) for values in ([17, 3], [0, 1, 3]))
    ids, known = torch.arange(3), (starts.tolist(), lengths.tolist())
    batch = Batch(ids, ids + 16, ids + 32, table, lengths, starts, 2, ancestors, known)
    found = batch_from_lists(unpack(pack(batch_to_lists(batch))), torch.device("cpu"))
    for name, wanted in vars(batch).items():
        value = getattr(found, name)
        assert torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted
        assert getattr(value, "dtype", None) == getattr(wanted, "dtype", None)


def test_jobs_arrive_as_they_were() -> None:
    options = EngineOptions(device="cpu", tensor_parallel=2, pipeline_parallel=3, micro_batches=4, kv_tokens=99)
    job = Job(Ranks(2, 3, 5), Address("127.0.0.1", 4711, "secret"), "demo", options)
    assert Job.from_json(job.to_json()) == job


def answering(count: int, micro_batches: int) -> tuple[Scheduler, list[Continuation]]:
    """Sequences whose prompts are computed and whose first tokens are known."""
    scheduler = Scheduler(PagePool(64, 16, True), Limits(64, 16, micro_batches=micro_batches))
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    sequences = [Continuation(id=number, prompt=[number + 3], params=params, rank=number, seed=0, max_new=9, waits=True)
                 for number in range(count)]  # fmt: skip
    for sequence in sequences:
        scheduler.add(sequence)
    arrive(scheduler.schedule().scheduled)
    return scheduler, sequences


def arrive(scheduled: Sequence[Any]) -> None:
    for work in scheduled:
        work.sequence.num_pending -= 1
        work.sequence.tokens.append(9)


@pytest.mark.parametrize(("count", "micro_batches", "sizes"), [(5, 2, [3, 2]), (4, 4, [1, 1, 1, 1]), (2, 3, [1, 1, 0])])
def test_answers_are_divided_among_the_steps_on_their_way(count: int, micro_batches: int, sizes: list[int]) -> None:
    scheduler, sequences = answering(count, micro_batches)
    plans = [scheduler.schedule() for _ in sizes]
    assert [len(plan.scheduled) for plan in plans] == sizes
    assert [work.sequence for plan in plans for work in plan.scheduled] == sequences
    assert not scheduler.schedule().scheduled, "a token that is on its way is waited for"
    arrive(plans[0].scheduled)
    again = scheduler.schedule()
    assert [work.sequence for work in again.scheduled] == [work.sequence for work in plans[0].scheduled]


def test_nobody_gives_way_while_its_step_is_on_its_way() -> None:
    """Its token is chosen when the step is back, and must not be lost."""
    scheduler = Scheduler(PagePool(5, 16, True), Limits(64, 4, micro_batches=2))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for number in range(2):
        prompt = list(range(100 * number, 100 * number + 31))
        scheduler.add(Continuation(number, prompt, params, rank=number, seed=0, max_new=40, waits=True))
    arrive(scheduler.schedule().scheduled)
    first, second = scheduler.running
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [plan.scheduled[0].sequence for plan in plans] == [first, second]
    arrive(plans[0].scheduled)  # now it needs a third page, and all four are taken
    stuck = scheduler.schedule()
    assert not stuck.scheduled
    assert not stuck.preempted
    arrive(plans[1].scheduled)
    free = scheduler.schedule()
    assert free.preempted == [second]
    assert [work.sequence for work in free.scheduled] == [first]


@pytest.mark.parametrize(("stages", "micro_batches", "share"), [(2, 2, 1 / 3), (4, 1, 3 / 4), (1, 8, 0), (4, 12, 0.2)])
def test_bubble(stages: int, micro_batches: int, share: float) -> None:
    assert bubble(stages, micro_batches) == pytest.approx(share)


def test_a_clock_that_is_off_counts_nothing() -> None:
    clock = BusyClock(torch.device("cpu"))
    with clock:
        sum(range(1000))
    assert clock.take() == 0
    clock.on = True
    with clock:
        sum(range(1000))
    assert clock.take() > 0
    assert clock.take() == 0


class Strangers:
    """Starts nothing; somebody else calls. After that, the rank that should have come is said to have died."""

    host = "127.0.0.1"
    devices = None

    def __init__(self, hello: Callable[[socket.socket], None]) -> None:
        self._hello = hello
        self.answer = b"?"

    def start(self, jobs: Sequence[Job]) -> None:
        self._connection = socket.create_connection((self.host, jobs[0].address.port))
        self._hello(self._connection)

    def check(self) -> dict[int, str]:
        if self.answer == b"?":
            self._connection.settimeout(0.2)
            try:
                self.answer = self._connection.recv(1)
            except TimeoutError:
                return {}
            except ConnectionError:
                self.answer = b""
        return {1: "nobody came"}

    def stop(self) -> None:
        self._connection.close()


@pytest.mark.parametrize(
    "hello",
    [
        lambda connection: connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        lambda connection: greet(connection, 1, new_token()),
        lambda connection: Channel(connection).send(Kind.TALK, b"[" * 100_000),
        lambda connection: connection.shutdown(socket.SHUT_WR),
    ],
    ids=["http", "wrong token", "nested", "no word"],
)
def test_strangers_are_turned_away(hello: Callable[[socket.socket], None]) -> None:
    strangers = Strangers(hello)
    coordinator = Coordinator(Ranks(2, 1), strangers, "demo", EngineOptions(device="cpu", tensor_parallel=2))
    try:
        with pytest.raises(QuantkitError, match="rank 1 of 2 died: nobody came"):
            coordinator.gather()
    finally:
        coordinator.stop()
    assert strangers.answer == b"", "the connection was closed"
