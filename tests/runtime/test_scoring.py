"""Logits of all positions from the decoder and its paged cache, whatever the steps, and nothing left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit import load_reference
from quantkit.arch import FAMILIES
from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine

IDS = torch.randint(3, 110, (75,), generator=torch.Generator().manual_seed(1))


def engine_of(folder: Path, **options: int) -> Engine:
    return start_engine(folder, EngineOptions(device="cpu", dtype="float32", **options))


@torch.no_grad()
def expected(folder: Path) -> Tensor:
    return load_reference(folder, "float32")(IDS[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_step_gives_the_same_logits(family: str, family_model: Callable[[str], Path]) -> None:
    """Windows of 75 tokens end in the middle of a page; sliding windows of 16 are shorter than a step."""
    folder = family_model(family)
    engine, wanted = engine_of(folder), expected(folder)
    for step in (1, 7, 75, None):
        torch.testing.assert_close(score_tokens(engine, IDS, step), wanted, rtol=0, atol=2e-4)
        engine.scheduler.pool.check_integrity([])


def test_steps_are_at_most_the_budget(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_model, step_tokens=20)
    decoder = engine.runner.decoder
    seen: list[int] = []
    compute = decoder.hidden_states
    monkeypatch.setattr(
        decoder, "hidden_states", lambda batch, cache: seen.append(len(batch.ids)) or compute(batch, cache)
    )
    whole = score_tokens(engine, IDS)
    assert seen == [20, 20, 20, 15]
    torch.testing.assert_close(score_tokens(engine, IDS, 999), whole, rtol=0, atol=0)
    assert seen[4:] == seen[:4]


def test_requests_in_flight_are_unharmed(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def answer(engine: Engine, disturbed: bool) -> list[int | None]:
        engine.add([5, 6, 7], params)
        tokens = []
        while engine.unfinished:
            tokens += [delta.token for delta in engine.step()]
            if disturbed:
                score_tokens(engine, IDS, 16)
                engine.check_integrity()
        return tokens

    assert answer(engine_of(tiny_model), True) == answer(engine_of(tiny_model), False)


def test_wrong_input_is_refused_and_frees_its_pages(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, kv_tokens=64, max_context=64)
    for ids, words in (
        (IDS, r"shape \[75\].* 1 to 64"),
        (IDS[:0], r"shape \[0\]"),
        (IDS[:4][None], r"shape \[1, 4\]"),
        (torch.tensor([1, 512]), "from 1 to 512, but the vocabulary has 512"),
        (torch.tensor([-1, 5]), "from -1 to 5"),
    ):
        with pytest.raises(InputError, match=words):
            score_tokens(engine, ids)
    with pytest.raises(InputError, match="step_tokens is 0"):
        score_tokens(engine, IDS[:4], 0)
    held = engine.scheduler.pool.allocate(3)
    assert held is not None
    with pytest.raises(InputError, match="need 2 pages of the cache, 1 are free"):
        score_tokens(engine, IDS[:20])
    engine.scheduler.pool.release(held)
    engine.scheduler.pool.check_integrity([])


def test_a_failing_step_frees_its_pages(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_model)

    def fail(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner.decoder, "logits", fail)
    with pytest.raises(RuntimeError):
        score_tokens(engine, IDS)
    engine.scheduler.pool.check_integrity([])


@pytest.mark.gpu
@pytest.mark.parametrize("step", [1, 7, 64, None])
def test_kernels_give_the_logits_of_the_reference(step: int | None, tmp_path: Path) -> None:
    """bfloat16 on both sides, NF4 weights: the difference is rounding."""
    quantkit.quantize("demo", "nf4", tmp_path / "nf4", quality_windows=0)
    options = EngineOptions(device="cuda", max_context=256, kv_tokens=256, max_sequences=1, graphs=False)
    engine = start_engine(tmp_path / "nf4", options)
    ids = IDS.repeat(3)
    with torch.no_grad():
        wanted = load_reference(tmp_path / "nf4", "bfloat16", "cuda")(ids[None].cuda(), use_cache=False).logits[0]
    found = score_tokens(engine, ids, step)
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 2e-2
    engine.scheduler.pool.check_integrity([])
