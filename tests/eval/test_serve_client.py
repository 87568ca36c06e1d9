"""The client of `quantkit bench serve` against a real server with scripted answers: times, counts, what goes wrong."""

import asyncio
import json
import time
from typing import Any

import pytest

from quantkit.eval.serve.answers import Answer
from quantkit.eval.serve.client import Client, Target
from quantkit.eval.serve.loads import Load
from quantkit.eval.serve.run import Measured, measure

ScriptedServer = Any  # conftest.py has it
CLOSE = None  # in a script: cut the connection
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHAT = "/v1/chat/completions"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def token(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def send(server: ScriptedServer, load: Load, timeout: float = 30.0, tokens: int = 4) -> Measured:
    async def run() -> Measured:
        client = Client(Target.parse(server.url), timeout=timeout)
        body = json.dumps({"max_tokens": tokens}).encode()
        try:
            return await measure(client, CHAT, lambda number: body, load)
        finally:
            await client.close()

    return asyncio.run(run())


def one_answer(server: ScriptedServer, script: list[Any], timeout: float = 30.0) -> Answer:
    server.script = lambda request: script
    return send(server, Load(concurrency=1, requests=1), timeout).answers[0]


def test_streams_are_counted_and_connections_reused(server: ScriptedServer) -> None:
    found = send(server, Load(concurrency=3, requests=10), tokens=5)
    assert len(found.answers) == len(server.requests) == 10
    assert [answer.error for answer in found.answers] == [None] * 10
    assert {(len(answer.stamps), answer.tokens, answer.prompt_tokens) for answer in found.answers} == {(5, 5, 5)}
    assert server.most_open <= 3
    assert server.connections == 3
    for answer in found.answers:
        assert found.begin <= answer.sent <= answer.stamps[0] <= answer.stamps[-1] <= answer.end
        assert list(answer.stamps) == sorted(answer.stamps)


def test_times_are_those_of_the_script(server: ScriptedServer) -> None:
    end = token("", "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    answer = one_answer(server, [STREAM, 0.05, token("a"), 0.03, token("b"), token("c"), 0.04, end])
    assert answer.error is None
    assert answer.ttft >= 0.049
    assert answer.ttft + answer.gaps[0] >= 0.079  # a token may be seen late, but never early
    assert answer.e2e >= 0.119
    assert answer.tpot == pytest.approx((answer.finish - answer.stamps[0]) / 2)


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ([refusal(503, "too many requests wait")], "status 503", "too many requests wait"),
        ([b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\nOops"], "status 500", "Oops"),
        ([STREAM, token("a"), chunk(b"data: {no json\n\n"), b"0\r\n\r\n"], "malformed event", "{no json"),
        ([STREAM, token("a"), event({"error": {"message": "lost"}}), b"0\r\n\r\n"], "error event", "lost"),
        ([STREAM, token("a"), CLOSE], "disconnect", "closed"),
        ([STREAM, token("a")[:9], CLOSE], "disconnect", "closed"),
        ([CLOSE], "disconnect", "closed"),
        ([STREAM, token("a"), b"0\r\n\r\n"], "disconnect", "ended before"),
        ([STREAM, token("a"), b"rubbish\r\n"], "malformed event", "rubbish"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"], "malformed event", "no stream"),
        ([STREAM, token("a"), 30.0], "timeout", "0.3 s"),
        ([30.0], "timeout", "0.3 s"),
    ],
)
def test_errors_by_kind(server: ScriptedServer, script: list[Any], kind: str, words: str) -> None:
    answer = one_answer(server, script, timeout=0.3 if kind == "timeout" else 30.0)
    assert answer.error == kind
    assert words in answer.message
    server.script = server.full_answer
    assert send(server, Load(concurrency=1, requests=1)).answers[0].error is None


def test_a_connection_that_the_server_gave_up_is_replaced(server: ScriptedServer) -> None:
    server.script = lambda request: [*server.full_answer(request), CLOSE]

    async def run() -> list[Answer]:
        client = Client(Target.parse(server.url))
        found = []
        for _ in range(3):
            found.append(await client.ask(CHAT, b'{"max_tokens": 2}'))
            time.sleep(0.1)  # the loop does not see that the server closes until it sends again
        await client.close()
        return found

    assert [answer.error for answer in asyncio.run(run())] == [None] * 3
    assert server.connections == 3


def test_arrivals_do_not_wait_for_answers(server: ScriptedServer) -> None:
    server.script = lambda request: [0.3, *server.full_answer(request)]
    found = send(server, Load(rate=100.0, requests=12))
    assert [answer.error for answer in found.answers] == [None] * 12
    assert server.most_open > 4
    assert [answer.sent for answer in found.answers] == sorted(answer.sent for answer in found.answers)


def test_streams_of_a_ramp_begin_one_by_one_and_count_when_all_are_there(server: ScriptedServer) -> None:
    begun: list[float] = []

    def script(request: Any) -> list[Any]:
        begun.append(time.perf_counter())
        return [0.1, *server.full_answer(request)]

    server.script = script
    found = send(server, Load(concurrency=4, requests=24, ramp_up=0.8))
    assert len(begun) == 24
    assert begun[4] - begun[0] < 0.8  # the first stream asked again before the last one began
    late = [at for at in begun if at - begun[0] >= 0.8]
    assert 4 <= len(found.answers) <= len(late) + 1 < 24
    assert min(answer.sent for answer in found.answers) >= found.begin


def test_seconds_end_a_load(server: ScriptedServer) -> None:
    found = send(server, Load(concurrency=2, seconds=0.3))
    assert len(found.answers) > 2
    assert {answer.error for answer in found.answers} == {None}
    assert found.seconds > 0.25
