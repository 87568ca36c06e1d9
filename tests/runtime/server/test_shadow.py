"""The quality watch: its arithmetic, and a quantized model beside its original in real engine processes."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


OPTIONS = {"device": "cpu", "max_context": 256}


class Kept(EngineClient):
    """An engine process for several watches, one after the other: the test starts and ends it."""

    async def start(self) -> None: ...

    async def close(self, drain_seconds: float = 0.0) -> None: ...


async def watch(served: EngineClient, reference: EngineClient) -> ShadowNumbers:
    await served.start()
    shadow = ShadowWatch(served, reference, rate=1.0)
    await shadow.start()
    try:
        for prompt in ([420, 518, 1060], [300, 301, 302, 303], [17, 900]):
            answer = [delta.token async for delta in served.submit(prompt, SamplingParams(max_tokens=20))]
            shadow.offer(prompt, [token for token in answer if token is not None])
        async with asyncio.timeout(30):
            while shadow.numbers().compared < 3:
                await asyncio.sleep(0.05)
        return shadow.numbers()
    finally:
        await shadow.close()
        await served.close()


async def watch_each(folders: dict[str, str]) -> dict[str, ShadowNumbers]:
    """Of each folder, and of the original beside itself."""
    reference = Kept("demo-draft", OPTIONS)
    await EngineClient.start(reference)
    served = {name: EngineClient(folder, OPTIONS) for name, folder in folders.items()} | {"original": reference}
    try:
        return {name: await watch(engine, reference) for name, engine in served.items()}
    finally:
        await EngineClient.close(reference)


@pytest.mark.parametrize("others", [(), pytest.param(("rtn-w8",), marks=pytest.mark.long)], ids=str)
def test_a_quantized_model_beside_its_original(others: tuple[str, ...], quantized_draft: Callable[..., Path]) -> None:
    """The original agrees with itself; eight bits nearly, three bits much less."""
    folders = {recipe: str(quantized_draft(recipe)) for recipe in (*others, "rtn-w3g128")}
    numbers = asyncio.run(watch_each(folders))
    three_bits = numbers["rtn-w3g128"]
    assert numbers["original"].agreement == 1.0 > three_bits.agreement
    assert numbers["original"].divergence < 1e-5
    assert three_bits.divergence > 0.01
    for recipe in others:
        assert numbers["original"].divergence < numbers[recipe].divergence < 0.01
        assert numbers[recipe].agreement > three_bits.agreement
    assert all(found.compared == 3 and found.nan_alarms == 0 for found in numbers.values())
