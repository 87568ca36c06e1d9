"""Where memory goes: arithmetic of pages and contexts for a given amount, and what weights take."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import MemoryPlan, available_memory, plan_memory, weight_bytes
from quantkit.runtime.model.config import ModelConfig, read_model_config

GENEROUS = 1 << 40
WEIGHTS = 5_000_000


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> ModelConfig:
    """2 layers, 2 heads of keys and values with 64 numbers each, 256 positions."""
    return read_model_config(Checkpoint(tiny_model).config)


def plan(config: ModelConfig, available: int = GENEROUS, **options: object) -> MemoryPlan:
    asked = EngineOptions(device="cpu", **options)  # type: ignore[arg-type]
    return plan_memory(config, WEIGHTS, torch.float32, asked, available)


def beside(config: ModelConfig, pages: int, **options: object) -> int:
    """Memory in which exactly so many pages fit."""
    roomy = plan(config, **options)
    return roomy.weights + roomy.activations + pages * roomy.page_bytes


def refusal(config: ModelConfig, available: int, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        plan(config, available, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {}, 2 * 2 * 2 * 16 * 64 * 4),
        (torch.bfloat16, {}, 2 * 2 * 2 * 16 * 64 * 2),
        (torch.float32, {"page_size": 64}, 2 * 2 * 2 * 64 * 64 * 4),
        (torch.float32, {"kv_dtype": "fp8"}, 2 * 2 * 2 * 16 * 64),
        (torch.float32, {"kv_dtype": "bf16"}, 2 * 2 * 2 * 16 * 64 * 2),
        (torch.float32, {"kv_dtype": "int8"}, 2 * 2 * 2 * 16 * (64 + 4)),
        (torch.float32, {"kv_dtype": "int4"}, 2 * 2 * 2 * 16 * (32 + 8)),
    ],
)
def test_bytes_of_a_page(config: ModelConfig, dtype: torch.dtype, options: dict[str, object], expected: int) -> None:
    """Keys and values, of every layer, head and token."""
    asked = EngineOptions(device="cpu", **options)  # type: ignore[arg-type]
    found = plan_memory(config, WEIGHTS, dtype, asked, GENEROUS)
    assert found.page_bytes == expected
    assert found.cache == found.pages * expected


def test_no_more_pages_than_all_sequences_can_fill(config: ModelConfig) -> None:
    found = plan(config, max_sequences=3)
    assert found.pages == 3 * 256 // 16 + 1  # and the padding page
    assert found.kv_tokens == 3 * 256
    assert found.max_context == 256
    assert plan(config, max_sequences=3, max_context=100).pages == 3 * 7 + 1  # 100 tokens begin 7 pages


def test_a_laptop_keeps_most_of_its_memory(config: ModelConfig) -> None:
    """2 GiB are enough for a CPU, unless one context needs more."""
    long = replace(config, max_positions=1 << 19)
    assert plan(long).cache == 2 << 30
    longer = replace(config, max_positions=1 << 21)
    assert plan(longer).pages == (1 << 21) // 16 + 1
    assert plan(longer).max_context == 1 << 21


def test_the_cache_has_the_size_that_was_asked_for(config: ModelConfig) -> None:
    found = plan(config, kv_tokens=1000)
    assert found.pages == 63 + 1
    assert found.kv_tokens == 1008  # whole pages
    assert found.max_context == 256


def test_contexts_end_where_the_cache_ends(config: ModelConfig) -> None:
    assert plan(config, kv_tokens=100).max_context == 112
    assert plan(config, kv_tokens=1).max_context == 16
    assert plan(config, kv_tokens=256).max_context == 256
    assert plan(config, kv_tokens=200, max_context=150).max_context == 150


def test_contexts_end_where_memory_ends(config: ModelConfig) -> None:
    """Nobody asked for 256 tokens: with less memory, contexts are shorter."""
    found = plan(config, beside(config, 11))
    assert found.pages == 11
    assert found.max_context == found.kv_tokens == 160
    assert plan(config, beside(config, 2)).max_context == 16


def test_fewer_pages_than_all_sequences_could_fill(config: ModelConfig) -> None:
    """Sequences wait or give way where pages are few."""
    assert plan(config, beside(config, 17), max_context=256, max_sequences=16).pages == 17
    assert plan(config, beside(config, 100)).pages == 100


def test_contexts_that_were_asked_for_are_not_shortened(config: ModelConfig) -> None:
    assert plan(config, beside(config, 17), max_context=256, max_sequences=1).max_context == 256
    message = refusal(config, beside(config, 11), max_context=256)
    for word in ("--max-context", "--kv-dtype int8", "--memory-share"):
        assert word in message
    message = refusal(config, GENEROUS, max_context=256, kv_tokens=255 - 16)
    for word in ("240 tokens", "max_context 256", "--max-context", "--kv-tokens"):
        assert word in message
    assert "256 positions" in refusal(config, GENEROUS, max_context=257)


def test_the_last_byte_counts(config: ModelConfig) -> None:
    exact = beside(config, 64, kv_tokens=1008)
    assert plan(config, exact, kv_tokens=1008).pages == 64
    message = refusal(config, exact - 1, kv_tokens=1008)
    assert "2.10 MB" in message  # 64 pages of 32 kB
    for word in ("does not fit", "weights 5.00 MB", "--kv-tokens", "--max-sequences", "--step-tokens"):
        assert word in message


@pytest.mark.parametrize("missing", [1, 10**9])
def test_weights_that_leave_nothing(config: ModelConfig, missing: int) -> None:
    message = refusal(config, max(0, beside(config, 2) - missing))
    for word in ("does not fit", "weights 5.00 MB", "for a cache of", "quantize to fewer bits"):
        assert word in message


def test_room_to_compute_grows_with_the_step(config: ModelConfig) -> None:
    small = plan(config, step_tokens=64, max_sequences=1)
    assert plan(config, step_tokens=128, max_sequences=1).activations > small.activations
    assert plan(config, step_tokens=64, max_sequences=1024).activations > small.activations
    logits = 512 * config.vocab * 4  # rows of prompt log-probabilities
    assert small.activations > logits
    assert small.graphs == 0  # a CPU has none
    assert small.weights == WEIGHTS


def test_the_plan_in_words(config: ModelConfig) -> None:
    words = plan(config, beside(config, 64, kv_tokens=1008), kv_tokens=1008).describe()
    for word in ("weights 5.00 MB", "activations", "cache for 1,008 tokens 2.10 MB", "contexts up to 256 tokens"):
        assert word in words
    assert "graphs" not in words


def test_memory_of_this_machine() -> None:
    whole = available_memory(torch.device("cpu"), 1.0)
    assert whole > 0
    assert 0.3 * whole < available_memory(torch.device("cpu"), 0.5) < 0.7 * whole


def test_weights_of_a_plain_checkpoint(tiny_model: Path) -> None:
    checkpoint = Checkpoint(tiny_model)
    tensors = load_file(tiny_model / "model.safetensors")
    assert weight_bytes(checkpoint, torch.bfloat16) == 2 * sum(tensor.numel() for tensor in tensors.values())
    assert weight_bytes(checkpoint, torch.float32) == bytes_beside_float32(tensors)


def bytes_beside_float32(tensors: dict[str, torch.Tensor]) -> int:
    """On a CPU, whose kernels take matrices of 16 bits as they are; vectors become float32."""
    return sum(tensor.nbytes if tensor.ndim == 2 else 4 * tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("recipe", ["rtn-w4g128", "nf4", "fp8"])
def test_weights_of_a_quantized_checkpoint(tiny_model: Path, tmp_path: Path, recipe: str) -> None:
    """Quantized layers as they are stored, embeddings and head in 16 bits, norms in the dtype of the activations."""
    quantkit.quantize(tiny_model, recipe, tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    plain = {name: t for name, t in tensors.items() if "_proj" not in name}
    stored = sum(t.numel() * t.itemsize for name, t in tensors.items() if name not in plain)
    numbers = sum(t.numel() for t in plain.values())
    checkpoint = Checkpoint(tmp_path / "q")
    assert weight_bytes(checkpoint, torch.bfloat16) == stored + 2 * numbers
    assert weight_bytes(checkpoint, torch.float32) == stored + bytes_beside_float32(plain)
    assert weight_bytes(checkpoint, torch.bfloat16) < weight_bytes(Checkpoint(tiny_model), torch.bfloat16)
