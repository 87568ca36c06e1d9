"""Keys less their centres: what attention finds does not change, what is rounded does; who has centres, and which."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.bundled import HELDOUT_TEXT
from quantkit.divergence import token_divergence
from quantkit.kernels.attention.integer_codes import BY_NAME
from quantkit.kernels.reference.compare import relative_error
from quantkit.kernels.reference.elementwise import turn_pairs
from quantkit.reference import load_tokenizer
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.key_centres import centre_of
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.rope import RopeTable
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine

SMALLER = ("fp8", *BY_NAME)


def start(model: str | Path, kv_dtype: str, **more: Any) -> Engine:
    sizes: dict[str, Any] = {"max_context": 256, "max_sequences": 2} | more
    return start_engine(model, EngineOptions(device="cpu", dtype="float32", kv_dtype=kv_dtype, **sizes))


def with_centres(engine: Engine, centres: torch.Tensor | None) -> Engine:
    engine.runner.cache = replace(engine.runner.cache, key_centres=centres)
    return engine


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    ids = load_tokenizer("demo-draft")(Path(HELDOUT_TEXT).read_text()[:4000])["input_ids"]
    return torch.tensor(ids[:256])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_does_not_change(family: str, family_model: Callable[[str], Path]) -> None:
    """Over a cache in full: in chunks, with sliding windows, with norms of keys."""
    ids = torch.randint(3, 110, (50,), generator=torch.Generator().manual_seed(1))
    engine = start(family_model(family), "auto", max_context=64)
    plain = score_tokens(engine, ids, 17)
    kept = engine.runner.cache.pages[:, 0, 1:4].clone()  # an engine's first pages, behind the one that pads
    shape = engine.config.layers, engine.config.kv_heads, engine.config.head_dim
    with_centres(engine, 3 * torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    assert relative_error(score_tokens(engine, ids, 17), plain) < 1e-5
    assert (engine.runner.cache.pages[:, 0, 1:4] - kept).abs().max() > 1


@pytest.mark.parametrize("kv_dtype", SMALLER)
def test_less_is_lost(kv_dtype: str, text: torch.Tensor) -> None:
    full = score_tokens(start("demo-draft", "auto"), text)
    engine = start("demo-draft", kv_dtype)
    lost = []
    for centres in (engine.runner.cache.key_centres, None):
        logits = score_tokens(with_centres(engine, centres), text, 64)
        lost.append(float(token_divergence(full, logits).mean()))
    assert 0 < lost[0] < 0.75 * lost[1]


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_what_rope_leaves_of_a_mean(factor: float) -> None:
    """Keys that were the same before rope: their centre is what they are on average, near positions counting more."""
    positions, half = 300, 3
    angles = torch.arange(positions)[:, None] * torch.tensor([2.0, 0.1, 1e-6])
    table = RopeTable(angles.cos() * factor, angles.sin() * factor)
    mean = torch.randn(1, 2, 2 * half + 2, generator=torch.Generator().manual_seed(0))  # two that do not turn
    turned = turn_pairs(mean.expand(positions, -1, -1), table.cos, table.sin)
    weight = torch.tensor([1 / (256 + position) for position in range(positions)])
    expected = (turned * (weight / weight.sum())[:, None, None]).sum(0)
    torch.testing.assert_close(centre_of(turned[:20], table), expected, rtol=1e-4, atol=1e-5)
    fast, slow = (centre_of(turned[:20], table)[:, pair] / mean[0, :, pair] for pair in (0, 2))
    assert float(fast.abs().max()) < 0.5
    torch.testing.assert_close(slow, torch.full_like(slow, factor), rtol=1e-3, atol=0)


def test_the_same_at_every_start() -> None:
    first, second = (start("demo-draft", "int8", **how) for how in ({}, {"step_tokens": 24, "page_size": 32}))
    centres = first.runner.cache.key_centres
    assert centres is not None
    assert second.runner.cache.key_centres is not None
    torch.testing.assert_close(second.runner.cache.key_centres, centres, rtol=1e-5, atol=1e-5)
    assert torch.equal(start("demo-draft", "fp8").runner.cache.key_centres, centres)  # type: ignore[arg-type]
    assert float(centres.abs().max()) > 1


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_where_a_shift_would_show_there_is_none(
    family: str, family_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="quantkit.runtime"):
        engine = start(family_model(family), "fp8", max_context=32)
    assert engine.runner.cache.key_centres is None
    assert "keys are kept without centres" in caplog.text


def test_a_cache_in_full_has_none() -> None:
    assert start("demo-draft", "auto").runner.cache.key_centres is None
    assert start("demo-draft", "bf16").runner.cache.key_centres is None


def test_a_draft_has_its_own() -> None:
    engine = start("demo-draft", "int4", speculative="self=rtn-w4g128,k=2")
    own, drafts = engine.runner.cache.key_centres, engine.speculation._drafter._part.cache.key_centres  # type: ignore
    assert own is not None
    assert 0 < relative_error(drafts, own) < 0.5
