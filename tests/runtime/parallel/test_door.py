"""Ranks come in at once, whoever else calls; whoever is no rank goes."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from quantkit.runtime.parallel import door as module
from quantkit.runtime.parallel.door import MOST_CALLERS, Door, greet, new_token

TOKEN = new_token()


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door("127.0.0.1", TOKEN)) as found:
        yield found


def call(door: Door) -> socket.socket:
    return socket.create_connection(("127.0.0.1", door.port), timeout=5)


def come(door: Door, turns: int = 200) -> dict[int, socket.socket]:
    """The first that come in."""
    for _ in range(turns):
        if found := door.wait(0.05):
            return found
    return {}


def test_ranks_come_in_beside_callers_that_say_nothing(door: Door) -> None:
    callers = [call(door) for _ in range(20)]
    rank = call(door)
    greet(rank, 3, TOKEN)
    (number, connection), *more = come(door).items()
    assert (number, more) == (3, [])
    rank.sendall(b"more")
    connection.settimeout(5)
    assert connection.recv(4) == b"more", "what follows the greeting is left to whoever it is for"
    for one in (*callers, rank, connection):
        one.close()


def test_a_caller_that_drips_is_not_waited_for(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it says a little, its time is counted from when it came."""
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.3)
    slow, end = call(door), time.monotonic() + 5
    slow.settimeout(0.02)
    while time.monotonic() < end:
        try:
            slow.sendall(b"x")
            door.wait(0.02)
            if slow.recv(1) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    else:
        pytest.fail("the connection is still open")
    slow.close()


def test_a_greeting_in_pieces(door: Door) -> None:
    rank = call(door)
    greeting = bytes.fromhex(TOKEN) + (7).to_bytes(4, "little")
    for at in range(0, len(greeting), 3):
        assert not door.wait(0.01)
        rank.sendall(greeting[at : at + 3])
    (number,) = found = come(door)
    assert number == 7
    found[number].close()
    rank.close()


def test_those_who_have_waited_longest_give_way(door: Door) -> None:
    callers = []
    for _ in range(MOST_CALLERS + 3):
        callers.append(call(door))
        door.wait(1)
    for gone in callers[:3]:
        assert gone.recv(1) == b""
    greet(callers[3], 1, TOKEN)
    (number,) = found = come(door)
    assert number == 1
    for one in (*callers, found[number]):
        one.close()


def test_after_the_door_is_closed_nobody_is_left(door: Door) -> None:
    caller = call(door)
    door.wait(1)
    door.close()
    assert caller.recv(1) == b""
    caller.close()
