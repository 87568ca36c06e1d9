"""The rehearsal before the first request: every range of token counts runs, and nothing of it is left."""

import pytest

from quantkit.kernels.linear.dispatch import BUCKETS
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.device.decode_graphs import graph_sizes
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.warm_up import sizes_to_capture, token_counts, warm_up


@pytest.fixture(scope="module")
def engine() -> Engine:
    return LLM("demo-draft", device="cpu", max_context=128, step_tokens=300, max_sequences=8).engine


def test_every_range_of_the_kernels_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    attention: set[tuple[bool, int]] = set()
    launch = engine.runner.launch

    def watched(plan):  # type: ignore[no-untyped-def]
        seen.append(sum(work.num_tokens for work in plan.scheduled))
        attention.add((len(plan.scheduled) == 8, max(work.num_tokens for work in plan.scheduled)))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", watched)
    parts: list[str] = []
    warm_up(engine, lambda part, total: parts.append(f"{part} of {total}"))
    assert {*(most for most in BUCKETS if most <= 256), 300} <= set(seen)
    assert max(seen) == 300
    assert {(many, tokens) for many in (False, True) for tokens in (2, 4, 8, 16, 32)} <= attention
    assert len(parts) == int(parts[0].rpartition(" ")[2])


def test_nothing_is_left(engine: Engine) -> None:
    warm_up(engine)
    pool = engine.scheduler.pool
    engine.check_integrity()
    assert (engine.busy, engine.steps, engine.generated, pool.free) == (False, 0, 0, pool.usable)
    prompt = list(range(100, 150))
    first, again = (_answer(engine, prompt) for _ in range(2))
    assert first == again
    assert engine.scheduler.reused_tokens == 48  # of the second one, three pages; of the first none
    fresh = LLM("demo-draft", device="cpu", max_context=128).engine
    assert _answer(fresh, prompt) == first


def _answer(engine: Engine, prompt: list[int]) -> list[int]:
    request = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.unfinished:
        engine.step()
    engine.drain()
    return request.sequences[0].answer


def test_a_small_cache_limits_the_steps() -> None:
    small = LLM("demo-draft", device="cpu", max_context=64, kv_tokens=160, step_tokens=512).engine
    assert max(token_counts(small)) <= 80
    warm_up(small)
    small.check_integrity()


def test_graph_sizes_to_capture() -> None:
    sizes = sizes_to_capture(256)
    assert sizes[-1] == 256
    assert set(sizes) <= set(graph_sizes(256))
    assert [size for size in graph_sizes(256) if size <= 64] == [size for size in sizes if size <= 64]
    assert len([size for size in sizes if size > 64]) <= 4
    assert sizes_to_capture(1) == [1]


@pytest.mark.gpu
def test_on_a_gpu_no_graph_is_captured_later() -> None:
    llm = LLM("demo", device="cuda", kv_tokens=50_000, max_context=512, max_sequences=32, warm_up=True)
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    before = set(graphs._graphs)
    assert {key.sequences for key in before} == set(graphs.sizes)
    llm.generate([[5, number] for number in range(20)], SamplingParams(max_tokens=12, ignore_eos=True))
    assert set(graphs._graphs) == before
