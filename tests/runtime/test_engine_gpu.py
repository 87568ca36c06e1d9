"""The engine on a GPU: many requests, aborts, graphs, overlap; every answer is the one that a request alone gets."""

import random

import pytest
import torch

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.llm import LLM
from quantkit.runtime.output.answers import Generation
from spoiled_logits import KINDS, spoil

pytestmark = pytest.mark.gpu

NOISE = 0.25  # nats between the two best tokens, below which bfloat16 in another batch may choose the other one
DISTINCT = 150


def distinct_requests(vocab: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 300 tokens, some with a common beginning; answers of 1 to 40."""
    generator = random.Random(0)
    common = [generator.randrange(vocab) for _ in range(200)]
    made = []
    for _ in range(DISTINCT):
        own = [generator.randrange(vocab) for _ in range(generator.randint(1, 100))]
        prompt = common[: generator.choice((0, 0, 64, 200))] + own
        params = SamplingParams(max_tokens=generator.randint(1, 40), ignore_eos=True, logprobs=2)
        made.append((prompt, params))
    return made


def assert_same_within_noise(found: list[int], alone: Generation) -> None:
    """Equal up to the first place where the two best tokens were nearly the same."""
    answer = alone.answers[0]
    assert answer.top_logprobs is not None
    for place, (one, other) in enumerate(zip(found, answer.token_ids, strict=True)):
        if one != other:
            first, second = (value for _, value in answer.top_logprobs[place])
            assert first - second < NOISE, f"token {place}: {one} instead of {other}, which led by {first - second}"
            return


@pytest.mark.parametrize(
    "options",
    [{"kv_tokens": 200_000}, {"kv_tokens": 6000}, {"kv_tokens": 6000, "swap_gib": 0.25}],
    ids=("roomy", "preempting", "swapping"),
)
def test_ten_thousand_requests(options: dict[str, float]) -> None:
    """Random arrivals and aborts; nothing leaks, and everybody gets the answer that they would get alone."""
    llm = LLM("demo", device="cuda", dtype="bfloat16", max_context=512, **options)
    engine = llm.engine
    requests = distinct_requests(engine.config.vocab)
    alone = [llm.generate([prompt], params)[0] for prompt, params in requests]
    engine.drain()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    generator = random.Random(1)
    which: dict[int, int] = {}
    answers: dict[int, list[int]] = {}
    finished = aborted = added = 0
    while added < 10_000 or engine.unfinished:
        for _ in range(generator.randint(0, 30) if added < 10_000 else 0):
            choice = generator.randrange(DISTINCT)
            request = engine.add(*requests[choice])
            which[request.id], answers[request.id] = choice, []
            added += 1
        if generator.random() < 0.2 and engine.requests:
            victim = generator.choice(list(engine.requests))
            engine.abort(victim)
            del which[victim]
            aborted += 1
        for delta in engine.step():
            assert delta.token is not None
            answers[delta.request].append(delta.token)
            if delta.finished is not None:
                finished += 1
                assert_same_within_noise(answers[delta.request], alone[which[delta.request]])
        if generator.random() < 0.05:
            engine.check_integrity()
    engine.drain()
    engine.check_integrity()
    assert finished + aborted == added
    assert aborted > 100
    assert engine.scheduler.pool.free == engine.scheduler.pool.usable
    if options["kv_tokens"] < 10_000:
        assert engine.scheduler.preemptions > 0
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (64 << 20)  # graphs of new sizes, nothing per request


def test_graphs_change_nothing() -> None:
    prompts = [prompt for prompt, _ in distinct_requests(2000)[:20]]
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)
    eager = LLM("demo", device="cuda", kv_tokens=200_000, max_context=512, graphs=False, overlap=False).generate(
        prompts, params
    )
    replayed = LLM("demo", device="cuda", kv_tokens=200_000, max_context=512).generate(prompts, params)
    for one, other in zip(eager, replayed, strict=True):
        assert_same_within_noise(other.answers[0].token_ids, one)


def test_agrees_with_the_cpu() -> None:
    """Log-probabilities of prompts in bfloat16 on the GPU, against float32 on the CPU."""
    prompts = ["The function returns a list of", "In the year 1848", "import numpy as np\n"]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    on_gpu = LLM("demo", device="cuda", kv_tokens=200_000, max_context=512).generate(prompts, params)
    on_cpu = LLM("demo", device="cpu", max_context=512).generate(prompts, params)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for value, wanted in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert value is not None
            assert value == pytest.approx(wanted, abs=0.15)


def test_fp8_cache() -> None:
    """Half the bytes, nearly the same numbers."""
    prompts = ["The function returns a list of", "In the year 1848"]
    params = SamplingParams(max_tokens=8, prompt_logprobs=0)
    full = LLM("demo", device="cuda", kv_tokens=200_000, max_context=512)
    half = LLM("demo", device="cuda", kv_tokens=200_000, max_context=512, kv_dtype="fp8")
    assert half.engine.memory.page_bytes * 2 == full.engine.memory.page_bytes
    for one, other in zip(half.generate(prompts, params), full.generate(prompts, params), strict=True):
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        for value, wanted in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert value == pytest.approx(wanted, abs=0.4)


def test_sampling_on_the_gpu() -> None:
    """A seed gives the same answer alone and in a crowd; penalties, biases and log-probabilities run."""
    llm = LLM("demo", device="cuda", kv_tokens=200_000, max_context=512)
    params = SamplingParams(
        max_tokens=16, temperature=0.9, top_p=0.9, top_k=50, seed=7, repetition_penalty=1.1, presence_penalty=0.5,
        logit_bias={5: -100.0}, min_tokens=4, logprobs=3,
    )  # fmt: skip
    alone = llm.generate(["The function returns"], params)[0].answers[0]
    crowd = llm.generate(["In the year", "The function returns", "A list"], params)[1].answers[0]
    same = [one == other for one, other in zip(alone.token_ids, crowd.token_ids, strict=False)]
    assert all(same[:4])
    assert 5 not in alone.token_ids
    assert alone.top_logprobs is not None
    assert all(len(row) == 3 for row in alone.top_logprobs)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("speculative", [None, "draft=demo-draft,k=3,adaptive=off"])
def test_logits_that_are_not_finite_end_one_answer(
    params: SamplingParams, speculative: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the device goes on: an index out of bounds would end its context, and with it the process."""
    llm = LLM("demo", device="cuda", dtype="bfloat16", max_context=128, kv_tokens=2048, speculative=speculative)
    engine = llm.engine
    requests = [engine.add([5 + number, 6, 7, 8], params) for number in range(4)]
    spoil(monkeypatch, requests[1].sequences[0], known=4)
    counts, reasons = [0] * 4, [""] * 4
    while engine.busy:
        for output in engine.step():
            counts[output.request - requests[0].id] += output.token is not None
            reasons[output.request - requests[0].id] = output.finished or ""
    assert reasons == ["length", "error", "length", "length"]
    assert counts[0] == counts[2] == counts[3] == 12
    assert 4 <= counts[1] < 12
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert len(llm.generate([[9, 8, 7]], params)[0].answers[0].token_ids) == 12


@pytest.mark.parametrize("max_context", [128, 240, 512])
def test_contexts_shorter_than_the_padding_of_a_graph(max_context: int) -> None:
    """A graph of 768 tokens for 520, say: what is missing has no page of a sequence, however short contexts are."""
    sizes = {"max_context": max_context, "max_sequences": 9, "share_prefixes": False}
    plain = LLM("demo", device="cuda", dtype="bfloat16", graphs=False, **sizes)
    graphed = LLM("demo", device="cuda", dtype="bfloat16", **sizes)
    generator = random.Random(max_context)
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
    for length, count in ((1, 1), (17, 1), (max_context - 8, 1), (65, 8), (100, 9), (max_context - 8, 3)):
        vocab = plain.engine.config.vocab
        prompts = [[generator.randrange(vocab) for _ in range(length)] for _ in range(count)]
        for alone, found in zip(plain.generate(prompts, params), graphed.generate(prompts, params), strict=True):
            assert_same_within_noise(found.answers[0].token_ids, alone)
    graphed.engine.check_integrity()
