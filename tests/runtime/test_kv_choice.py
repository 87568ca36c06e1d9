"""What `--kv-dtype auto` picks, and where it says so."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint import Checkpoint
from quantkit.kernels.card import KNOWN
from quantkit.runtime import startup
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device import kv_choice
from quantkit.runtime.device.card_plan import small_kv_dtype
from quantkit.runtime.device.kv_choice import KvChoice, RankNeed, choose_kv_dtype
from quantkit.runtime.device.memory import plan_memory, room_for_cache, weight_bytes
from quantkit.runtime.model.config import ModelConfig, read_model_config
from quantkit.runtime.startup import start_engine
from quantkit.sources import model_folder

FLOAT = torch.float32


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return read_model_config(Checkpoint(model_folder("demo-draft")).config)


def choose(config: ModelConfig, available: int, ranks: int = 1, **options: Any) -> KvChoice:
    asked = EngineOptions(device="cpu", **options)
    return choose_kv_dtype([RankNeed(config, 1000)] * ranks, FLOAT, asked, available)


def memory_for(config: ModelConfig, tokens: int, **options: Any) -> int:
    """Exactly enough."""
    asked = EngineOptions(device="cpu", **options)
    room = room_for_cache(config, 1000, FLOAT, asked, 1 << 40)
    return (1 << 40) - room.bytes + room.bytes_of(tokens)


@pytest.mark.parametrize(
    ("options", "tokens", "says"),
    [
        ({"max_context": 100}, 112, "100 tokens"),
        ({"max_context": 100, "max_sequences": 3}, 336, "3 x 100 tokens"),
        ({"kv_tokens": 500, "max_context": 100, "max_sequences": 3}, 500, "500 tokens"),
    ],
)
def test_a_byte_decides(config: ModelConfig, options: dict[str, Any], tokens: int, says: str) -> None:
    enough = memory_for(config, tokens, **options)
    fits = choose(config, enough, **options)
    assert (fits.kv_dtype, fits.reason, fits.is_smaller) == ("auto", f"{says} fit", False)
    short = choose(config, enough - 1, **options)
    assert (short.kv_dtype, short.is_smaller) == ("int8", True)
    assert short.reason.startswith(f"{says} need ")
    assert " in float32, and " in short.reason
    assert choose(config, enough - 1, **options, kv_dtype="bf16") == KvChoice("bf16", "asked for")
    assert plan_memory(config, 1000, FLOAT, EngineOptions(device="cpu", **options), enough).kv_tokens >= tokens


def test_one_rank_that_is_short_decides_for_all(config: ModelConfig) -> None:
    available = memory_for(config, 112, max_context=100)
    asked = EngineOptions(device="cpu", max_context=100)
    ranks = [RankNeed(config, 1000), RankNeed(config, 1001)]
    assert choose_kv_dtype(ranks, FLOAT, asked, available).kv_dtype == "int8"
    assert choose_kv_dtype(ranks[:1], FLOAT, asked, available).kv_dtype == "auto"


def test_who_asks_for_nothing_keeps_what_activations_have(config: ModelConfig) -> None:
    found = choose(config, memory_for(config, 32))
    assert found.kv_dtype == "auto"
    assert "float32 unless --max-context asks for more" in found.reason


@pytest.mark.parametrize(
    ("card", "entry", "expected"),
    [
        ("sm_80", (2, 8, 128), "int8"),
        ("sm_86", (2, 8, 128), "int8"),
        ("sm_89", (2, 8, 128), "int8"),
        ("sm_90", (2, 8, 128), "int8"),
        ("sm_90", (1, 1, 576), "fp8"),
        ("sm_80", (1, 1, 576), None),  # latents are in no integers
        (None, (2, 8, 128), "int8"),
        (None, (1, 1, 576), "fp8"),
    ],
)
def test_eight_bits_of_a_card(card: str | None, entry: tuple[int, int, int], expected: str | None) -> None:
    assert small_kv_dtype(None if card is None else KNOWN[card], entry) == expected


def test_without_a_smaller_cache_the_start_refuses_as_before(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_choice, "small_kv_dtype", lambda *_: None)
    found = choose(config, memory_for(config, 112, max_context=100) - 1, max_context=100)
    assert (found.kv_dtype, found.is_smaller) == ("auto", False)
    assert "no smaller cache" in found.reason


def test_an_engine_says_what_it_picked(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decided before weights are read; every part of the engine goes by it."""
    options = EngineOptions(device="cpu", max_context=512, max_sequences=2, dtype="float32")
    weights = weight_bytes(Checkpoint(model_folder("demo-draft")), FLOAT)
    room = room_for_cache(config, weights, FLOAT, options, 1 << 40)
    available = (1 << 40) - room.bytes + room.bytes_of(700)
    monkeypatch.setattr(startup, "available_to_rank", lambda *_: available)
    engine = start_engine("demo-draft", options)
    assert engine.runner.cache.kind.label == engine.options.kv_dtype == "int8"
    assert engine.memory.kv_tokens >= 1024
    (line,) = [one for one in caplog.records if one.getMessage().startswith("KV cache in int8: 2 x 512 tokens need ")]
    assert line.levelno == logging.WARNING
    roomy = start_engine("demo-draft", replace(options, max_sequences=1))
    assert roomy.kv_choice == KvChoice("auto", "512 tokens fit")
    assert roomy.runner.cache.kind.label == "float32"


def test_a_draft_takes_the_same_kind(
    config: ModelConfig, quantized_draft: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_choice, "small_kv_dtype", lambda *_: "fp8")
    options = EngineOptions(device="cpu", max_context=512, max_sequences=2, dtype="float32", speculative="self=rtn-w8")
    needed: list[RankNeed] = []

    def short(ranks: list[RankNeed], dtype: torch.dtype, asked: EngineOptions, _: int) -> KvChoice:
        needed.extend(ranks)
        room = room_for_cache(ranks[0].config, ranks[0].weights, dtype, asked, 1 << 40, ranks[0].draft)
        return choose_kv_dtype(ranks, dtype, asked, (1 << 40) - room.bytes + room.bytes_of(1000))

    monkeypatch.setattr(startup, "choose_kv_dtype", short)
    loaded: list[str] = []
    allocate = startup.allocate_draft_cache
    monkeypatch.setattr(
        startup, "allocate_draft_cache", lambda *of: (loaded.append(allocate(*of).kind.label), allocate(*of))[1]
    )
    engine = start_engine("demo-draft", options)
    assert needed[0].draft is not None
    assert loaded == [engine.runner.cache.kind.label] == ["float8_e4m3fn"]


def test_a_plan_says_what_a_start_would_keep(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    asked = ("plan", "llama-3.1-8b", "-r", "gptq-w4g128", "--batch", "8,32", "--context", 4096)
    code, shown, _ = run_cli(*asked, "--gpu", "rtx4090")
    assert code == 0
    line = "note: with --max-context 4096 --max-sequences 32, --kv-dtype auto keeps keys and values in int8 beside bf16"
    assert line in " ".join(shown.split())
    _, shown, _ = run_cli(*asked, "--gpu", "rtx3090", "--json")
    assert json.loads(shown)["auto_caches"] == {"bf16": "int8", "gptq-w4g128": "int8"}
    _, shown, _ = run_cli(*asked, "--gpu", "h200", "--json")
    assert json.loads(shown)["auto_caches"] == {"bf16": "16 bits", "gptq-w4g128": "16 bits"}
    _, shown, _ = run_cli(*asked, "--gpu", "h200", "--kv-dtype", "int4", "--json")
    assert json.loads(shown)["auto_caches"] == {}
