"""The engine process: answers, aborts, refusals, a violent death and the restart after it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from quantkit.runtime.server.engine_process import client as engine_client
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.engine_process.pending import EngineDied, PendingRequest

PROMPT = [420, 518, 1060]
Use = Callable[[EngineClient], Coroutine[Any, Any, Any]]
pytestmark = pytest.mark.xdist_group("engine-process")


@pytest.fixture(scope="module")
def with_engine() -> Iterator[Callable[[Use], Any]]:
    """`with_engine(use)` runs something with a real engine process, the same for all tests."""
    with asyncio.Runner() as runner:
        client = EngineClient("demo-draft", {"device": "cpu", "max_context": 256})
        runner.run(client.start())
        try:
            yield lambda use: runner.run(use(client))
        finally:
            runner.run(client.close())  # once more, where a test has closed it


async def tokens_of(client: EngineClient, params: SamplingParams) -> list[list[int | None]]:
    found: list[list[int | None]] = [[] for _ in range(params.n)]
    async for delta in client.submit(PROMPT, params):
        found[delta.index].append(delta.token)
    return found


async def drained(pending: PendingRequest) -> None:
    async for _ in pending:
        pass


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def test_the_process_answers_as_the_engine_does(with_engine: Callable[[Use], Any]) -> None:
    kinds = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=5, logit_bias={5: -2.5}, repetition_penalty=1.2),
        SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1),
    ]

    async def use(client: EngineClient) -> Any:
        together = await asyncio.gather(*(tokens_of(client, params) for params in kinds))
        last = client.submit(PROMPT, kinds[2])
        deltas = [delta async for delta in last]
        assert client.open_requests == 0
        return together, deltas, last.prompt_logprobs, last.queued_seconds, client.info

    together, deltas, prompt_logprobs, queued, info = with_engine(use)
    llm = LLM("demo-draft", device="cpu", max_context=256)
    for found, params in zip(together, kinds, strict=True):
        assert found == [answer.token_ids for answer in llm.generate([PROMPT], params)[0].answers]
    wanted = llm.generate([PROMPT], kinds[2])[0]
    assert [delta.logprob for delta in deltas] == pytest.approx(wanted.answers[0].logprobs, abs=1e-4)
    assert prompt_logprobs[0] is None
    assert prompt_logprobs[1:] == pytest.approx(wanted.prompt_logprobs[1:], abs=1e-4)  # type: ignore[index]
    assert 0 <= queued < 5
    assert info.max_context == 256
    assert info.vocab == llm.engine.config.vocab


async def one_of_three_ends(client: EngineClient) -> None:
    """The others go on, and the engine computes no more of it than was on its way."""
    await until(lambda: client.stats.running == 0)
    before = client.stats.generated_tokens
    pending = client.submit(PROMPT, SamplingParams(n=3, max_tokens=150, temperature=1.0, seed=3, ignore_eos=True))
    counts = [0, 0, 0]
    async for output in pending:
        counts[output.index] += 1
        if counts[1] == 2 and output.index == 1:
            pending.abort(1)
    assert counts[0] == counts[2] == 150
    assert client.open_requests == 0
    await until(lambda: client.stats.running == 0)
    assert client.stats.generated_tokens - before < 2 * 150 + 75


def test_aborts_give_pages_back_and_others_go_on(with_engine: Callable[[Use], Any]) -> None:
    async def use(client: EngineClient) -> None:
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        doomed = [client.submit(PROMPT, long) for _ in range(6)]
        other = asyncio.create_task(tokens_of(client, SamplingParams(max_tokens=40, ignore_eos=True)))
        for pending in doomed:
            await anext(aiter(pending))
            pending.abort()
            with pytest.raises(StopAsyncIteration):
                await anext(aiter(pending))
        assert len((await other)[0]) == 40
        await one_of_three_ends(client)
        await until(lambda: client.stats.running == 0 and client.stats.kv_pages_used == 0)
        assert client.open_requests == 0

    with_engine(use)


def test_wrong_requests_are_refused_and_others_go_on(with_engine: Callable[[Use], Any]) -> None:
    async def use(client: EngineClient) -> None:
        running = asyncio.create_task(tokens_of(client, SamplingParams(max_tokens=30, ignore_eos=True)))
        await asyncio.sleep(0)
        for prompt, words in (([], "empty"), ([1] * 300, "contexts end at 256"), ([10**6], "not in the vocabulary")):
            with pytest.raises(InputError, match=words):
                client.submit(prompt, SamplingParams())
        with pytest.raises(InputError, match="logit_bias"):
            client.submit(PROMPT, SamplingParams(logit_bias={10**6: 1.0}))
        assert len((await running)[0]) == 30

    with_engine(use)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSTOP, "hung"), pytest.param(signal.SIGKILL, "died", marks=pytest.mark.long)],
    ids=["hangs", "killed"],
)
def test_a_process_that_ends_or_hangs_is_replaced(
    number: int, words: str, with_engine: Callable[[Use], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open requests fail at once, the client is not ready, and then answers as before."""
    monkeypatch.setattr(engine_client, "LOOK_SECONDS", 0.2)

    async def use(client: EngineClient) -> None:
        monkeypatch.setattr(client, "_silent_seconds", 2.0)
        restarts = client.restarts
        before = await tokens_of(client, SamplingParams(max_tokens=8))
        pending = [client.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)) for _ in range(3)]
        await anext(aiter(pending[0]))
        pid = client.pid
        assert pid is not None
        os.kill(pid, number)
        for one in pending:
            with pytest.raises(EngineDied, match=words):
                await asyncio.wait_for(drained(one), 5)
        assert not client.ready
        with pytest.raises(EngineDied, match=f"not ready .*{words}"):
            client.submit(PROMPT, SamplingParams())
        await until(lambda: client.ready)
        assert client.restarts == restarts + 1
        assert client.failure is None
        assert client.pid != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert await tokens_of(client, SamplingParams(max_tokens=8)) == before

    with_engine(use)


def test_starts_that_fail_are_tried_again_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they raise; who asks meanwhile is told why."""
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.01)
    client = EngineClient("demo-draft", {})
    errors: list[Exception] = [OSError("no more processes"), ValueError("a message of another version")]
    seen: list[str] = []

    async def spawn() -> asyncio.StreamReader:
        seen.append(client.why_not_ready)
        if errors:
            raise errors.pop(0)
        return asyncio.StreamReader()

    async def ready(reader: asyncio.StreamReader) -> None:
        client.ready = True

    monkeypatch.setattr(client, "_spawn", spawn)
    monkeypatch.setattr(client, "_wait_until_ready", ready)
    asyncio.run(client._start_again(0.0))
    assert client.ready
    assert client.failure is None
    assert "no more processes" in seen[1]
    assert "another version" in seen[2]
    assert [(one["event"], one["next_attempt_seconds"]) for one in client.troubles] == [
        ("the engine does not start", 0.01),
        ("the engine does not start", 0.02),
    ]


@pytest.mark.parametrize(("silent", "step"), [(60.0, 0.0), (0.0, 400.0)])
def test_when_an_engine_is_taken_for_hung(silent: float, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "LOOK_SECONDS", 0.01)
    client = EngineClient("demo-draft", {})
    client._heard, client._step_takes = time.monotonic() - silent, step
    assert asyncio.run(asyncio.wait_for(client._look_for_life(), 1)) == "the engine process hung"
    (told,) = client.troubles
    assert told["event"] == "the engine hangs"
    client._heard, client._step_takes = time.monotonic(), 100.0
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(client._look_for_life(), 0.1))


def test_the_engine_ends_when_its_server_is_killed() -> None:
    """No orphan stays behind, even amid an answer."""
    code = """
import asyncio, os, signal
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.server.engine_process.client import EngineClient

async def main():
    client = EngineClient("demo-draft", {"device": "cpu", "max_context": 256})
    await client.start()
    await anext(aiter(client.submit([420, 518], SamplingParams(max_tokens=200, ignore_eos=True))))
    print(client.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    engine = Path(f"/proc/{int(run.stdout)}/stat")
    for _ in range(200):
        if not engine.exists() or engine.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(int(run.stdout), signal.SIGKILL)
    pytest.fail("the engine process lives on")


def test_closing_waits_for_open_requests(with_engine: Callable[[Use], Any]) -> None:
    """The last test of the common process, which is gone afterwards."""

    async def use(client: EngineClient) -> int:
        pid = client.pid
        assert pid is not None
        answer = asyncio.create_task(tokens_of(client, SamplingParams(max_tokens=60, ignore_eos=True)))
        await asyncio.sleep(0.05)
        await client.close(drain_seconds=30)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        return len((await answer)[0])

    assert with_engine(use) == 60


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("demo-draft", {"device": "cpu", "kv_tokens": 10**12}, "does not fit"),
        pytest.param("nowhere", {}, "no model at 'nowhere'", marks=pytest.mark.long),
    ],
)
def test_a_model_that_cannot_start(model: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        asyncio.run(EngineClient(model, options).start())


def test_a_process_that_dies_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent to it is never read, which the other end of a socket sees as a reset."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDied, match=r"ended before it was ready \(exit code 1\)"):
        asyncio.run(EngineClient("demo", {}).start())


class Ending:
    """A process that ends when it is told to."""

    pid = 0

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        return 0


@pytest.mark.parametrize("turns", range(6))
def test_a_supervisor_is_cancelled_whatever_it_does(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as the dead engine's process is gone, some turns of the event loop later: else `close` waits for ever."""

    async def run() -> None:
        client, process = EngineClient("demo-draft", {}), Ending()
        monkeypatch.setattr(client, "_process", process)
        monkeypatch.setattr(client, "_spawn", asyncio.Event().wait)  # another one never comes
        supervising = asyncio.create_task(client._start_again(0.0))
        await asyncio.sleep(0.01)
        process.ended.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        supervising.cancel()
        await asyncio.wait({supervising}, timeout=1)
        assert supervising.cancelled()

    asyncio.run(run())
