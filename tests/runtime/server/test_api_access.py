"""Keys, limits and goodbyes: who may ask, how much, and what is left behind when a client leaves."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from quantkit.runtime.server.config_file import ApiKey
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.middleware.access import MOST_CALLERS, RateLimit
from quantkit.runtime.server.models.admission import AdmissionQueue

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEYS = (ApiKey.of("alice", ALICE), ApiKey.of("bob", BOB))
PLAIN = "/v1/completions"
SHORT = {"prompt": "Hello", "max_tokens": 1}
LONG = {"prompt": "In the year", "max_tokens": 480, "ignore_eos": True}


@contextmanager
def asking(server: Any, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A request on its way; the connection is closed in the end, whether it was answered or not."""
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=30)
    connection.request("POST", PLAIN, json.dumps(body), {"Content-Type": "application/json"})
    try:
        yield connection
    finally:
        connection.close()


def test_keys(start_server: Any) -> None:
    server = start_server(api_keys=KEYS)
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {ALICE}"},
        {"Authorization": ALICE},
    ):
        reply = server.ask("POST", PLAIN, SHORT, **headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.error["type"] == "authentication_error"
        assert ALICE not in reply.error["message"]
    for key in (ALICE, BOB):
        assert server.ask("POST", PLAIN, SHORT, Authorization=f"Bearer {key}").status == 200
    assert server.ask("GET", "/v1/models").status == 401
    assert server.ask("POST", "/tokenize", {"prompt": "x"}).status == 401
    for path in ("/health", "/ready", "/version", "/metrics", "/"):
        assert server.ask("GET", path).status == 200
    schema = server.ask("GET", "/openapi.json").json
    assert schema["paths"][PLAIN]["post"]["security"]
    assert "401" in schema["paths"][PLAIN]["post"]["responses"]
    with server.openai(api_key="nobody") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_stranger_cannot_make_the_server_read(start_server: Any) -> None:
    """The key is looked at before the body."""
    server = start_server(api_keys=KEYS)
    host, port = server.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 401 " in connection.recv(100)


def test_each_key_has_its_own_rate(start_server: Any) -> None:
    server = start_server(api_keys=KEYS, rate_limit_requests_per_minute=2)

    def ask(key: str) -> Any:
        return server.ask("POST", PLAIN, SHORT, Authorization=f"Bearer {key}")

    assert [ask(ALICE).status for _ in range(3)] == [200, 200, 429]
    reply = ask(ALICE)
    assert reply.error["code"] == "rate_limit_exceeded"
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert ask(BOB).status == 200
    assert b'status="429"' in server.ask("GET", "/metrics").content
    with server.openai(api_key=ALICE) as client, pytest.raises(openai.RateLimitError):
        client.completions.create(model="demo", prompt="x", max_tokens=1)


def test_a_rate_limit_refills_and_forgets() -> None:
    rate = RateLimit(60)
    assert [rate.take("a", now=0.0) for _ in range(60)] == [0.0] * 60
    assert rate.take("a", now=0.0) == pytest.approx(1.0)
    assert rate.take("a", now=0.5) == pytest.approx(0.5)
    assert rate.take("a", now=1.01) == 0.0
    for caller in range(MOST_CALLERS + 5):
        rate.take(str(caller), now=2.0)
    assert len(rate._buckets) == MOST_CALLERS


def test_the_queue_counts_answers() -> None:
    queue = AdmissionQueue(at_once=2, waiting=1)
    first = queue.enter(5)  # alone, it may be larger than all the room
    with pytest.raises(ApiError):
        queue.enter(1)
    first.leave()
    first.leave()
    tickets = [queue.enter(1) for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        queue.enter(1)
    assert caught.value.status == 429
    for ticket in tickets:
        ticket.leave()
    assert queue.taken == 0


def test_a_full_queue(start_server: Any) -> None:
    server = start_server(max_queue=1)
    with asking(server, LONG | {"n": server.engine.info.max_sequences + 1, "stream": True}) as connection:
        connection.getresponse()  # the headers: it is being answered
        reply = server.ask("POST", PLAIN, SHORT)
        assert reply.status == 429
        assert reply.error["code"] == "queue_full"
        assert reply.headers["retry-after"]
        assert server.ask("POST", "/tokenize", {"prompt": "x"}).status == 200
    server.wait_until_idle()
    assert server.ask("POST", PLAIN, SHORT).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(live_server: Any, stream: bool) -> None:
    """Its request ends at once, and its pages come back."""
    live_server.wait_until(lambda stats: stats.running == 0)
    before, generated = live_server.stats.kv_pages_used, live_server.stats.generated_tokens
    with asking(live_server, LONG | {"n": 4, "stream": stream}) as connection:
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        live_server.wait_until(lambda stats: stats.running == 4)
    live_server.wait_until_idle()
    assert live_server.stats.kv_pages_used <= before
    assert live_server.stats.generated_tokens - generated < 4 * 480
    assert live_server.engine.open_requests == 0


def test_large_bodies(start_server: Any) -> None:
    server = start_server(max_request_bytes=2000)
    body = json.dumps(SHORT | {"user": "x" * 3000}).encode()
    reply = server.ask("POST", PLAIN, body)
    assert reply.status == 413
    assert reply.error["code"] == "request_too_large"
    assert "2000" in reply.error["message"]
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=10)
    connection.request("POST", PLAIN, iter([body[:1500], body[1500:]]), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 413  # although it did not say how long it would be
    connection.close()
    assert server.ask("POST", PLAIN, SHORT).status == 200


def test_the_time_limit(start_server: Any) -> None:
    server = start_server(request_timeout_seconds=1.1)
    long = LONG | {"n": 8}
    reply = server.ask("POST", PLAIN, long)
    assert reply.status == 504
    assert reply.error["code"] == "timeout"
    assert "1.1 s" in reply.error["message"]
    streamed = server.ask("POST", PLAIN, long | {"stream": True})
    assert streamed.status == 200
    *chunks, last = streamed.content.decode().strip().split("\n\n")
    assert len(chunks) > 1
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    with asking(server, SHORT | {"max_tokens": 1}) as connection:
        assert connection.getresponse().status == 200
    server.wait_until_idle()


def test_a_body_that_comes_too_slowly(start_server: Any) -> None:
    server = start_server(request_timeout_seconds=0.3)
    host, port = server.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in connection.recv(100)


def test_pages_of_other_origins(start_server: Any, live_server: Any) -> None:
    server = start_server(cors_origins=["https://chat.example.org"])
    asked = {"Origin": "https://chat.example.org", "Access_Control_Request_Method": "POST"}
    assert server.ask("OPTIONS", PLAIN, **asked).headers["access-control-allow-origin"] == asked["Origin"]
    assert "access-control-allow-origin" in server.ask("POST", PLAIN, SHORT, Origin=asked["Origin"]).headers
    other = server.ask("POST", PLAIN, SHORT, Origin="https://evil.example.org")
    assert "access-control-allow-origin" not in other.headers
    reply = live_server.ask("POST", PLAIN, SHORT, Origin=asked["Origin"])
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log(start_server: Any, caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    server = start_server(log_prompts=log_prompts, api_keys=KEYS)
    with caplog.at_level(logging.DEBUG):
        body = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 2}
        headers = {"Authorization": f"Bearer {ALICE}", "X_Request_Id": "my-own-id"}
        reply = server.ask("POST", "/v1/chat/completions?token=hidden", body, **headers)
        end = time.monotonic() + 5
        while not (records := [one for one in caplog.records if one.getMessage() == "request"]):
            assert time.monotonic() < end  # the line is written after the last byte is out
            time.sleep(0.01)
    assert reply.headers["x-request-id"] == "my-own-id"
    (record,) = records
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["request_id"] == "my-own-id"
    assert fields["key_name"] == "alice"
    assert fields["status"] == 200
    assert fields["generated_tokens"] >= 1
    assert fields["first_token_seconds"] <= fields["seconds"]
    assert ("secret words" in str(fields)) == log_prompts
    assert "hidden" not in str(fields)
    assert not any(ALICE in str(record.__dict__) for record in caplog.records)


def test_a_long_prompt_does_not_stall_others(live_server: Any) -> None:
    """Tokenizing a megabyte takes a second; everybody else is answered meanwhile."""
    text = "The function returns a list of words. " * 30_000
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(live_server.ask("POST", "/tokenize", {"prompt": text})))
    thread.start()
    asked = 0
    while thread.is_alive():
        assert live_server.ask("GET", "/health").status == 200
        asked += 1
    thread.join()
    assert replies[0].json["count"] > 100_000
    assert asked > 5  # a server that waits for the tokens answers one before and one behind them
