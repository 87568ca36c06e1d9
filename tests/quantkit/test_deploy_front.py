"""Routing by prefix, and the endpoint before the replicas: what happens when one of them dies. None of it needs Ray."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from quantkit.deploy.forwarding import Forwarded, Part, answer
from quantkit.deploy.front import ReplicaGone, front_app
from quantkit.deploy.front_metrics import merged_metrics
from quantkit.deploy.prefixes import BLOCK_CHARACTERS, PrefixTable, preferred, prefix_of
from quantkit.runtime.server.settings import ServerSettings

LONG = "x" * (3 * BLOCK_CHARACTERS)
KEY = "0123456789abcdef0123"


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_equal_beginnings_have_equal_blocks() -> None:
    short, longer, other = (prefix_of({"prompt": text}) for text in (LONG, LONG + LONG, "y" + LONG))
    assert len(short) == 3
    assert longer[:3] == short
    assert longer[3] != short[0]  # the same text at another place is another block
    assert not set(other) & set(short)
    assert prefix_of(chat(LONG))[:2] == prefix_of(chat(LONG, "more"))[:2]
    assert prefix_of(chat(LONG)) != prefix_of(chat(LONG) | {"tools": [{"type": "function"}]})
    assert prefix_of({"prompt": list(range(1000))})[:5] == prefix_of({"prompt": [list(range(900))]})[:5]


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": "short"}, {"prompt": []}, {"messages": [None, 3]},
                                  {"messages": "no list"}, {"prompt": {"no": "text"}}])  # fmt: skip
def test_bodies_without_a_block(body: dict[str, Any]) -> None:
    assert prefix_of(body) == ()


def test_the_holder_of_the_prefix_is_preferred_unless_it_is_much_busier() -> None:
    table, prefix = PrefixTable(), prefix_of({"prompt": LONG})
    table.record(prefix, "b")
    assert preferred(table, prefix, {"a": 0, "b": 4, "c": 1}, margin=4) == ["b", "a", "c"]
    assert preferred(table, prefix, {"a": 0, "b": 5, "c": 1}, margin=4) == ["a", "c", "b"]
    assert preferred(table, prefix, {"a": 0, "b": 0, "c": 1}, margin=4, avoid=("b",)) == ["a", "c", "b"]
    assert preferred(table, prefix, {"b": 9}, margin=0, avoid=("b",)) == ["b"]
    assert preferred(table, prefix, {}, margin=4) == []


def test_the_longest_match_wins_and_the_gone_are_forgotten() -> None:
    table, longer = PrefixTable(), prefix_of({"prompt": LONG + LONG})
    table.record(longer[:2], "a")
    table.record(longer[:5], "b")
    assert (table.matched(longer, "a"), table.matched(longer, "b")) == (2, 5)
    assert preferred(table, longer, {"a": 0, "b": 0}, margin=1)[0] == "b"
    table.keep_only(["a"])
    assert (table.matched(longer, "b"), len(table)) == (0, 2)


def test_the_table_is_bounded_and_keeps_the_newest() -> None:
    table = PrefixTable(most=3)
    table.record((1, 2, 3), "a")
    table.record((1,), "a")
    table.record((4,), "a")
    assert (len(table), table.matched((1,), "a"), table.matched((2,), "a")) == (3, 1, 0)


def test_unknown_beginnings_spread_and_fronts_agree() -> None:
    loads = {"a": 0.0, "b": 0.0, "c": 0.0}
    chosen = [preferred(PrefixTable(), prefix_of({"prompt": f"{n} {LONG}"}), loads, margin=2)[0] for n in range(60)]
    again = [preferred(PrefixTable(), prefix_of({"prompt": f"{n} {LONG}"}), loads, margin=2)[0] for n in range(60)]
    assert chosen == again
    assert min(chosen.count(name) for name in loads) > 8


def run_app(app: Any, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request through an ASGI application; what had been sent before it raised is lost, as for a client."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = tuple((key.encode(), value.encode()) for key, value in headers.items())
    request = Forwarded(method, path, b"", given, ("127.0.0.1", 1), content)

    async def run() -> list[Message]:
        return [message async for batch in answer(app, request) for message in batch]

    messages = asyncio.run(run())
    found = {key.decode(): value.decode() for key, value in messages[0]["headers"]}
    return messages[0]["status"], found, b"".join(message.get("body", b"") for message in messages)


class Replicas:
    """Replicas as small applications. One that raises ReplicaGone dies at that point."""

    def __init__(self, **models: list[Callable[[Scope, Receive, Send], Awaitable[None]]]) -> None:
        self.models = models
        self.asked: list[tuple[str, Forwarded]] = []

    async def ask(self, model: str, request: Forwarded) -> AsyncGenerator[Part, None]:
        number = next(n for n, _ in enumerate(self.models[model]) if f"{model}{n}" not in request.avoid)
        self.asked.append((f"{model}{number}", request))
        yield f"{model}{number}"
        async for messages in answer(self.models[model][number], request):
            yield messages

    async def metrics(self, model: str) -> list[tuple[str, str]]:
        page = '# HELP x_total Text.\n# TYPE x_total counter\nx_total{{model_name="{}"}} 2.0\n'
        return [(f"{model}{number}", page.format(model)) for number, _ in enumerate(self.models[model])]


def says(content: Any, status: int = 200) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    return JSONResponse(content, status, {"Retry-After": "5"} if status == 503 else None)


async def dies(scope: Scope, receive: Receive, send: Send) -> None:
    raise ReplicaGone


async def dies_amid_the_stream(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield b'data: {"choices":[]}\n\n'
        await asyncio.sleep(0.01)
        raise ReplicaGone

    await StreamingResponse(parts(), media_type="text/event-stream")(scope, receive, send)


async def dies_after_its_answer(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"text": "whole"})(scope, receive, send)
    raise ReplicaGone


def front(replicas: Replicas, **settings: Any) -> Any:
    return front_app(ServerSettings(model="front", page=False, **settings), tuple(replicas.models), replicas)


def complete(replicas: Replicas, model: str = "a", **settings: Any) -> tuple[int, dict[str, str], bytes]:
    return run_app(front(replicas, **settings), "POST", "/v1/completions", {"model": model, "prompt": LONG})


def test_the_model_decides_who_answers() -> None:
    replicas = Replicas(a=[says("from a")], b=[says("from b")])
    status, headers, body = complete(replicas, "b")
    assert (status, headers["x-quantkit-replica"], body) == (200, "b0", b'"from b"')
    assert len(replicas.asked[0][1].prefix) == 3
    status, _, body = complete(replicas, "c")
    assert status == 404
    assert json.loads(body)["error"]["message"] == "no model 'c' here; this server has: a, b"
    status, _, body = run_app(front(replicas), "POST", "/v1/completions", {"prompt": "x"})
    assert (status, json.loads(body)["error"]["param"]) == (400, "model")
    for content in (b"", b"no json", b"[1]", b'{"model": 3, "prompt": ""}'):  # the replica's parser says what is wrong
        assert run_app(front(replicas), "POST", "/v1/completions", content)[2] == b'"from a"'


def test_one_model_needs_no_name() -> None:
    replicas = Replicas(a=[says("from a")])
    assert run_app(front(replicas), "POST", "/v1/completions", {"prompt": "x"})[2] == b'"from a"'


def test_a_replica_that_dies_before_the_first_byte_is_replaced_by_another() -> None:
    replicas = Replicas(a=[dies, says("second")])
    assert complete(replicas)[2] == b'"second"'
    assert [name for name, _ in replicas.asked] == ["a0", "a1"]


def test_a_request_kills_two_replicas_at_most() -> None:
    replicas = Replicas(a=[dies, dies, says("third")])
    status, headers, body = complete(replicas)
    assert (status, headers["retry-after"], len(replicas.asked)) == (503, "1", 2)
    assert json.loads(body)["error"] == {
        "message": "the replica that computed the answer died; try again",
        "type": "server_error",
        "param": None,
        "code": "replica_died",
    }


def test_a_replica_that_cannot_answer_now_is_left_alone_for_a_while() -> None:
    replicas = Replicas(a=[says("restarting", 503), says("second")])
    app = front(replicas)
    for _ in range(2):
        assert run_app(app, "POST", "/v1/completions", {"model": "a", "prompt": "x"})[2] == b'"second"'
    assert [name for name, _ in replicas.asked] == ["a0", "a1", "a1"]
    status, headers, body = complete(Replicas(a=[says("one", 503), says("two", 503)]))
    assert (status, headers["retry-after"], body) == (503, "5", b'"two"')


def test_a_stream_that_breaks_ends_with_an_error_and_is_not_asked_again() -> None:
    replicas = Replicas(a=[dies_amid_the_stream, says("never")])
    status, _, body = complete(replicas)
    first, last = body.decode().strip().split("\n\n")
    assert (status, first) == (200, 'data: {"choices":[]}')
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_died"
    assert len(replicas.asked) == 1


def test_a_death_after_the_answer_changes_nothing() -> None:
    replicas = Replicas(a=[dies_after_its_answer, says("never")])
    assert complete(replicas)[2] == b'{"text":"whole"}'
    assert len(replicas.asked) == 1


def test_what_the_front_answers_itself() -> None:
    listed = {"data": [{"id": "a"}]}
    replicas = Replicas(a=[says(listed)], b=[says({"data": [{"id": "b"}]})])
    assert json.loads(run_app(front(replicas), "GET", "/v1/models")[2])["data"] == [{"id": "a"}, {"id": "b"}]
    assert run_app(front(replicas), "GET", "/health")[0] == 200
    assert run_app(front(replicas), "GET", "/ready")[0] == 200
    down = Replicas(a=[says(listed)], b=[says("no", 503)])
    assert run_app(front(down), "GET", "/ready")[0] == 503
    assert run_app(front(down), "GET", "/health")[0] == 200
    page = run_app(front(replicas), "GET", "/metrics")[2].decode()
    (family,) = text_string_to_metric_families(page)
    assert [sample.labels for sample in family.samples] == [
        {"model_name": "a", "replica": "a0"},
        {"model_name": "b", "replica": "b0"},
    ]
    assert merged_metrics([]) == b""


def test_keys_are_asked_for_at_the_front_and_stay_there(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {KEY}\n")
    keys.chmod(0o600)
    replicas = Replicas(a=[says("yes")])
    app = front(replicas, api_keys_file=str(keys))
    body = {"model": "a", "prompt": "x"}
    assert run_app(app, "POST", "/v1/completions", body)[0] == 401
    assert not replicas.asked
    assert run_app(app, "POST", "/v1/completions", body, authorization=f"Bearer {KEY}")[0] == 200
    assert b"authorization" not in dict(replicas.asked[0][1].headers)


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/page/status", "/nowhere", "/v2/models"])
def test_what_asks_for_no_key_reaches_no_replica(path: str) -> None:
    """Else strangers would cost replicas time, and have more of them started."""
    replicas = Replicas(a=[says("yes")])
    app = front(replicas)
    for method in ("GET", "POST"):
        status, _, content = run_app(app, method, path, {"model": "a"})
        assert (status, json.loads(content)["error"]["code"]) == (404, "not_found")
    assert not replicas.asked


def test_an_application_hears_that_its_reader_left() -> None:
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append((await receive())["type"])

    async def run() -> None:
        parts = answer(app, Forwarded("POST", "/", b"", (), None, b""))
        await anext(parts)
        await parts.aclose()

    asyncio.run(run())
    assert heard == ["http.disconnect"]
