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


def test_a_killed_process_is_replaced(with_engine: Callable[[Use], Any]) -> None:
    """Open requests fail at once, the client is not ready, and then answers as before."""

    async def use(client: EngineClient) -> None:
        before = await tokens_of(client, SamplingParams(max_tokens=8))
        pending = [client.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)) for _ in range(3)]
        await anext(aiter(pending[0]))
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for one in pending:
            with pytest.raises(EngineDied, match="died"):
                await asyncio.wait_for(drained(one), 2)
        assert not client.ready
        with pytest.raises(EngineDied, match="not ready"):
            client.submit(PROMPT, SamplingParams())
        await until(lambda: client.ready)
        assert client.restarts == 1
        assert client.pid != pid
        assert await tokens_of(client, SamplingParams(max_tokens=8)) == before

    with_engine(use)


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
