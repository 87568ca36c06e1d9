"""`quantkit.AsyncLLM`: streams that run side by side, and what ends them. One engine process for all tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest

import quantkit
from quantkit import AsyncLLM, GuideSpec, SamplingParams
from quantkit.errors import InputError
from quantkit.runtime.output.output_processor import TextOutput
from quantkit.runtime.server.engine_process.pending import EngineDied

Use = Callable[[AsyncLLM], Coroutine[Any, Any, Any]]
PROMPTS = ["The function returns", "A list of", "When the", "import"]
KINDS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=20, n=2, temperature=1.0, seed=3),
    SamplingParams(max_tokens=30, stop=["the"]),
    SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=0),
]
CHAT = [{"role": "user", "content": "Hello"}]
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)
pytestmark = pytest.mark.xdist_group("engine-process")


@pytest.fixture(scope="module")
def with_llm() -> Iterator[Callable[[Use], Any]]:
    with asyncio.Runner() as runner:
        llm = AsyncLLM("demo-draft", device="cpu", max_context=256, max_sequences=4)
        runner.run(llm.start())
        try:
            yield lambda use: runner.run(use(llm))
        finally:
            runner.run(llm.close())


async def pieces_of(stream: AsyncIterator[TextOutput]) -> list[TextOutput]:
    return [piece async for piece in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def test_interleaved_streams_are_those_of_one_alone(with_llm: Callable[[Use], Any]) -> None:
    order: list[int] = []

    async def read(llm: AsyncLLM, number: int) -> list[str]:
        texts = [""] * KINDS[number].n
        async for piece in llm.generate(PROMPTS[number], KINDS[number]):
            order.append(number)
            texts[piece.index] += piece.text
        return texts

    async def use(llm: AsyncLLM) -> Any:
        together = await asyncio.gather(*(read(llm, number) for number in range(len(PROMPTS))))
        return together, await llm.answer(PROMPTS[3], KINDS[3]), await llm.chat(CHAT, KINDS[0])

    together, whole, chat = with_llm(use)
    alone = quantkit.LLM("demo-draft", device="cpu", max_context=256)
    for found, prompt, params in zip(together, PROMPTS, KINDS, strict=True):
        assert found == [answer.text for answer in alone.generate(prompt, params)[0].answers]
    assert order != sorted(order), "one stream after the other"
    assert chat.text == alone.chat(CHAT, KINDS[0]).text
    wanted = alone.generate(PROMPTS[3], KINDS[3])[0]
    assert whole.prompt_token_ids == wanted.prompt_token_ids
    assert whole.answers[0].token_ids == wanted.answers[0].token_ids
    assert whole.answers[0].logprobs == pytest.approx(wanted.answers[0].logprobs, abs=1e-4)
    assert whole.prompt_logprobs is not None
    assert wanted.prompt_logprobs is not None
    assert whole.prompt_logprobs[1:] == pytest.approx(wanted.prompt_logprobs[1:], abs=1e-4)


def test_what_is_cancelled_or_left_gives_its_pages_back(with_llm: Callable[[Use], Any]) -> None:
    async def use(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(llm.answer(prompt, ENDLESS)) for prompt in PROMPTS[:2]]
        async with aclosing(llm.generate(PROMPTS[2], ENDLESS)) as stream:
            await anext(stream)
            await until(lambda: llm.stats.running == 3 and llm.stats.kv_pages_used > 0)
        for task in tasks:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: llm.stats.running == 0 and llm.stats.kv_pages_used == 0)
        assert len(await pieces_of(llm.generate(PROMPTS[0], KINDS[0]))) == 12

    with_llm(use)


def test_lower_priorities_go_first(with_llm: Callable[[Use], Any]) -> None:
    async def use(llm: AsyncLLM) -> None:
        began: list[str] = []

        async def read(name: str, priority: int) -> None:
            async for _ in llm.generate(PROMPTS[0], SamplingParams(max_tokens=2), priority=priority):
                began.append(name)

        blocking = [asyncio.create_task(llm.answer(PROMPTS[1], ENDLESS)) for _ in range(4)]
        await until(lambda: llm.stats.running == 4)
        waiting = [asyncio.create_task(read("late", 5)), asyncio.create_task(read("early", -5))]
        await until(lambda: llm.stats.waiting == 2)
        blocking.pop().cancel()
        await asyncio.gather(*waiting)
        assert began == ["early", "early", "late", "late"]
        for task in blocking:
            task.cancel()
        await asyncio.gather(*blocking, return_exceptions=True)

    with_llm(use)


def test_guides_hold(with_llm: Callable[[Use], Any]) -> None:
    async def use(llm: AsyncLLM) -> None:
        guide = GuideSpec("json_schema", json.dumps({"enum": ["left", "right"]}))
        found = await llm.answer(PROMPTS[0], SamplingParams(max_tokens=20), guide=guide)
        assert json.loads(found.text) in ("left", "right")
        assert found.answers[0].finish_reason == "stop"

    with_llm(use)


def test_wrong_requests_are_refused_and_leave_nothing(with_llm: Callable[[Use], Any]) -> None:
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(InputError, match="empty"):
            await llm.answer([])
        with pytest.raises(InputError, match="contexts end at 256"):
            await anext(llm.generate([1] * 300))
        with pytest.raises(InputError, match="regex"):
            await llm.answer(PROMPTS[0], guide=GuideSpec("regex", "(" * 3))
        await until(lambda: llm.stats.running == llm.stats.waiting == 0)

    with_llm(use)


def test_wrong_options_and_an_engine_that_was_not_started() -> None:
    with pytest.raises(InputError, match="kv_dtype"):
        AsyncLLM("demo-draft", kv_dtype="int3")
    with pytest.raises(EngineDied, match="async with"):
        _ = AsyncLLM("demo-draft").info
