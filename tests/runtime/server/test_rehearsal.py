"""What is rehearsed while a server answers: real engines on a CPU, for which nothing else would be rehearsed."""

import asyncio
import http.client
import json
import queue
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.app import create_app
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.engine_process.process import EngineLoop, rehearsal_of
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.warm_up import Part, Rehearsal, all_parts
from quantkit.sources import model_folder

SIZES: dict[str, Any] = {"device": "cpu", "max_context": 128, "max_sequences": 4, "step_tokens": 64}
PROMPT = list(range(100, 140))
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return LLM("demo-draft", **SIZES).engine


@pytest.fixture
def answer() -> list[int]:
    [generation] = LLM("demo-draft", **SIZES).generate([PROMPT], PARAMS)
    return list(generation.answers[0].token_ids)


def wanted() -> dict[str, Any]:
    params = asdict(replace(PARAMS, stop=())) | {"logit_bias": []}
    return {"add": {"id": 7, "prompt": PROMPT, "params": params, "priority": 0, "guide": None}}


def run_until(engine: Engine, parts: list[Part], inbox: Any, done: Callable[[dict[str, Any]], bool]) -> list[Any]:
    """What the loop says until `done`, in this thread."""
    said: list[Any] = []

    class Outbox(queue.Queue):  # type: ignore[type-arg]
        def put(self, message: Any, *_: Any, **__: Any) -> None:
            said.append(message)
            if done(message):
                inbox.put(None)

    EngineLoop(engine, "demo-draft", Outbox(), Rehearsal(engine, parts)).run(inbox)
    return said


def tokens_of(said: list[Any]) -> list[int]:
    return [row[2] for message in said for row in message.get("outputs", ())]


def test_a_request_waits_for_one_part_only(engine: Engine, answer: list[int]) -> None:
    inbox: Any = queue.Queue()
    parts, ran = all_parts(engine), []

    def watched(part: Part) -> Part:
        def run() -> None:
            if len(ran) == 2:  # somebody asks in the middle of the third part
                inbox.put(wanted())
            ran.append(part.name)
            part.run()

        return Part(part.name, run)

    after: list[int] = []

    def over(message: dict[str, Any]) -> bool:
        after.extend([len(ran)] * len(message.get("outputs", ())))
        return bool(message.get("stats", {}).get("rehearsal_left") == 0 and after)

    said = run_until(engine, [watched(part) for part in parts], inbox, over)
    assert tokens_of(said) == answer
    assert after == [3] * len(answer)  # no part ran before the answer was there
    assert ran == [part.name for part in parts]
    stats = [message["stats"] for message in said if "stats" in message]
    assert [one["rehearsal_left"] for one in stats] == sorted((one["rehearsal_left"] for one in stats), reverse=True)
    assert (stats[1]["rehearsing"], stats[-1]["rehearsing"]) == (parts[2].name, "")
    assert (stats[-1]["generated_tokens"], stats[-1]["prompt_tokens"]) == (len(answer), len(PROMPT))
    engine.check_integrity()


def test_shared_pages_outlive_a_rehearsal(engine: Engine) -> None:
    engine.forget()
    for _ in range(2):
        engine.add(PROMPT, PARAMS)
        while engine.unfinished:
            engine.step()
        engine.drain()
        rehearsal = Rehearsal(engine, all_parts(engine)[:2])
        while rehearsal.left:
            rehearsal.step()
    assert engine.scheduler.reused_tokens == len(PROMPT) // 16 * 16
    assert engine.generated == 2 * PARAMS.max_tokens  # type: ignore[operator]


def test_a_part_that_fails_is_the_last(engine: Engine, answer: list[int]) -> None:
    def broken() -> None:
        engine.add([1, 2, 3], PARAMS)
        runner, engine.runner.launch = engine.runner.launch, lambda plan: 1 // 0  # type: ignore[method-assign]
        try:
            engine.step()
        finally:
            engine.runner.launch = runner  # type: ignore[method-assign]

    inbox: Any = queue.Queue()
    parts = [Part("fails", broken), Part("never", lambda: pytest.fail("it goes on"))]

    def done(message: dict[str, Any]) -> bool:
        if message.get("stats", {}).get("rehearsal_left") == 0 and not said_before:
            said_before.append(1)
            inbox.put(wanted())
        return any(row[3] is not None for row in message.get("outputs", ()))

    said_before: list[int] = []
    said = run_until(engine, parts, inbox, done)
    assert any("ZeroDivisionError" in message["fault"]["why"] for message in said if "fault" in message)
    assert tokens_of(said) == answer


def test_nothing_is_rehearsed_on_a_cpu(engine: Engine) -> None:
    assert rehearsal_of(engine).left == 0


class RehearsingClient(EngineClient):
    async def _start_process(self, connection: Any) -> asyncio.subprocess.Process:
        number = connection.fileno()
        script = str(Path(__file__).with_name("rehearsing_engine.py"))
        return await asyncio.create_subprocess_exec(
            sys.executable, script, str(number), pass_fds=[number], stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[Callable[[str], Any]]:
    """Gives what asks the application for a path."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, ws="none"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]

    def ask(path: str) -> str:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    try:
        yield lambda path: asyncio.to_thread(ask, path)
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_ready_says_what_is_left(runner: asyncio.Runner) -> None:
    settings = ServerSettings(model="demo-draft", **SIZES)

    async def use() -> None:
        client = RehearsingClient("demo-draft", settings.engine_options)
        await client.start()
        try:
            async with listening(create_app(settings, client, load_tokenizer(model_folder("demo-draft")))) as ask:
                first = json.loads(await ask("/ready"))
                assert first["status"] == "ready"
                assert first["left"] > 1
                assert first["rehearsing"]
                tokens = [output.token async for output in client.submit(PROMPT, PARAMS)]
                assert len(tokens) == 6
                assert client.stats.rehearsal_left > 0  # it was answered before all was rehearsed
                async with asyncio.timeout(60):
                    while client.stats.rehearsal_left:
                        await asyncio.sleep(0.02)
                assert json.loads(await ask("/ready")) == {"status": "ready"}
                assert 'quantkit:rehearsal_left{model_name="demo-draft"} 0.0' in await ask("/metrics")
        finally:
            await client.close()

    runner.run(use())
