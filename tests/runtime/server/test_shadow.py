"""The quality watch: its arithmetic, and a quantized model beside its original in real engine processes."""

import asyncio
import math
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.shadow import ShadowNumbers, ShadowWatch, compare, divergence_of, repeats

pytestmark = pytest.mark.xdist_group("engine-process")


def row(logits: torch.Tensor, most: int) -> dict[int, float]:
    values, tokens = logits.log_softmax(-1).topk(most)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


def test_divergence_is_a_lower_bound_that_tightens() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(50) * 3, torch.randn(50) * 3
    exact = float((one.softmax(-1) * (one.log_softmax(-1) - other.log_softmax(-1))).sum())
    found = [divergence_of(row(one, most), row(other, most)) for most in (5, 20, 50)]
    assert all(0 <= value <= exact + 1e-5 for value in found)
    assert found[2] == pytest.approx(exact, rel=1e-4)
    assert divergence_of(row(one, 20), row(one, 20)) == pytest.approx(0.0, abs=1e-6)


def test_comparison_counts_agreement_and_sees_nan() -> None:
    same = [{1: -0.1, 2: -3.0}, {5: -0.2, 1: -2.0}]
    other = [{1: -0.2, 2: -2.5}, {1: -0.2, 5: -2.0}]
    found = compare(same, other)
    assert found is not None
    assert found.agreement == 0.5
    assert found.positions == 2
    assert compare([{1: math.nan}], [{1: -0.1}]) is None


def test_repetition() -> None:
    assert repeats([1, 2, 3] * 40)
    assert repeats([9, 8, 7] + [5] * 64)
    assert not repeats([5] * 20)  # too short to tell
    assert not repeats(list(range(200)))


async def watch(folder: str, rate: float) -> ShadowNumbers:
    options = {"device": "cpu", "max_context": 256}
    served = EngineClient(folder, options)
    await served.start()
    shadow = ShadowWatch(served, EngineClient("demo", options), rate)
    await shadow.start()
    try:
        for prompt in ([420, 518, 1060], [300, 301, 302, 303], [17, 900]):
            answer = [delta.token async for delta in served.submit(prompt, SamplingParams(max_tokens=20))]
            shadow.offer(prompt, [token for token in answer if token is not None])
        async with asyncio.timeout(30):
            while rate and shadow.numbers().compared < 3:
                await asyncio.sleep(0.05)
        return shadow.numbers()
    finally:
        await shadow.close()
        await served.close()


def test_a_quantized_model_beside_its_original(tmp_path: Path) -> None:
    """The original agrees with itself; eight bits nearly, three bits much less."""
    numbers = {}
    for recipe in ("rtn-w8", "rtn-w3g128"):
        quantkit.quantize("demo", recipe, tmp_path / recipe, quality_windows=0)
        numbers[recipe] = asyncio.run(watch(str(tmp_path / recipe), 1.0))
    numbers["demo"] = asyncio.run(watch("demo", 1.0))
    assert numbers["demo"].agreement == 1.0
    assert numbers["demo"].divergence < 1e-5
    assert numbers["demo"].divergence < numbers["rtn-w8"].divergence < 0.01 < numbers["rtn-w3g128"].divergence
    assert numbers["rtn-w8"].agreement > numbers["rtn-w3g128"].agreement
    assert all(found.compared == 3 and found.nan_alarms == 0 for found in numbers.values())
