"""Steps that were recorded give what steps give that are run by Python."""

from pathlib import Path

import pytest

from quantkit.eval.engine.run import Load as Requests
from quantkit.eval.engine.run import random_prompts
from quantkit.kernels.cpu.installed import can_compile
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.startup import start_engine

SIZES = {"max_context": 96, "kv_tokens": 1024}


def answers(engine: Engine, requests: int) -> dict[int, list[int]]:
    """Longer than a page, and of different lengths, so that sizes of steps change."""
    prompts = random_prompts(Requests(requests, 12, 9), engine.config.vocab, 0)
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=9 + 5 * number, ignore_eos=True))
    while engine.unfinished:
        for delta in engine.step():
            assert delta.token is not None
            found.setdefault(delta.request, []).append(delta.token)
    return {number: found[request] for number, request in enumerate(sorted(found))}


@pytest.mark.skipif(not can_compile(), reason="needs llvmlite")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_the_same(tiny_model: Path, dtype: str) -> None:
    by_python, recorded = (
        start_engine(tiny_model, EngineOptions(device="cpu", dtype=dtype, graphs=graphs, **SIZES))  # type: ignore[arg-type]
        for graphs in (False, True)
    )
    assert answers(recorded, 3) == answers(by_python, 3)
    assert by_python.runner.part.tapes is None
    tapes = recorded.runner.part.tapes
    assert tapes is not None
    assert sorted(size for size, step in tapes._steps.items() if step is not None) == [1, 2, 3]
