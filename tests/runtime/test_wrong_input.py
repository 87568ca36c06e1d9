"""Wrong requests, checkpoints and sizes: one clear error that names what is wrong; what runs is not disturbed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.errors import InputError, QuantkitError, StorageError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.llm import LLM
from quantkit.runtime.startup import start_engine

CONTEXT = 128
UP = "model.layers.1.mlp.up_proj"
# Recipe -> the part of a layer that holds its scales.
SCALES = {"rtn-w4g128": "scales", "nf4": "weight.nested_absmax", "llm-int8": "SCB", "fp8": "weight_scale"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo-draft", device="cpu", kv_tokens=CONTEXT, max_sequences=4, step_tokens=64)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    return LLM(tiny_model, device="cpu", kv_tokens=CONTEXT)


@pytest.fixture(scope="module")
def quantized(quantized_tiny: Callable[..., Path]) -> dict[str, Path]:
    return {recipe: quantized_tiny(recipe) for recipe in SCALES}


@pytest.fixture
def others(llm: LLM) -> Iterator[Engine]:
    """An engine amid two requests, which go on afterwards and get the answers that they get alone."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [llm.encode(text) for text in ("Once upon a time", "The capital of France")]
    alone = [llm.generate([prompt], params)[0].answers[0].token_ids for prompt in prompts]
    engine = llm.engine
    for left in list(engine.requests):  # by a test that failed
        engine.abort(left)
    requests = [engine.add(prompt, params) for prompt in prompts]
    for _ in range(4):
        engine.step()
    yield engine
    engine.check_integrity()
    assert engine.unfinished == 2, "the refused request left something behind"
    while engine.unfinished:
        engine.step()
    assert [request.sequences[0].answer for request in requests] == alone
    engine.check_integrity()


def refusal(kind: type[QuantkitError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ([], ("prompt is empty",)),
    "as long as the context": ([5] * CONTEXT, (f"{CONTEXT} tokens", f"contexts end at {CONTEXT}", "shorten")),
    "longer than the context": ([5] * 5000, ("5000 tokens", f"contexts end at {CONTEXT}", "shorten")),
    "negative": ([5, -1], ("token id -1", "4096")),
    "too large": ([4096, 5], ("token id 4096", "4096 tokens")),
    "bool": ([5, True], ("token id True",)),
    "float": ([5, 6.0], ("token id 6.0",)),
    "text": (["five"], ("token id 'five'",)),
    "nothing": ([5, None], ("token id None",)),
}
PARAMETERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "temperature": ({"temperature": -0.1}, ("temperature is -0.1", "at least 0")),
    "n": ({"n": 0}, ("n is 0", "from 1 to 16384")),
    "top_p": ({"top_p": 0}, ("top_p is 0", "above 0")),
    "max_tokens": ({"max_tokens": 0}, ("max_tokens is 0",)),
    "min_tokens": ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens is 9", "8")),
    "logprobs": ({"logprobs": 21}, ("logprobs is 21", "20")),
    "logit_bias": ({"logit_bias": {4096: 1}}, ("logit_bias names token 4096", "0 to 4095")),
    "stop_token_ids": ({"stop_token_ids": [5, 70000]}, ("stop_token_ids names token 70000", "0 to 4095")),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_wrong_prompts(others: Engine, name: str) -> None:
    prompt, words = PROMPTS[name]
    message = refusal(InputError, lambda: others.add(prompt, SamplingParams()))
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", PARAMETERS)
def test_wrong_parameters(others: Engine, name: str) -> None:
    fields, words = PARAMETERS[name]
    message = refusal(InputError, lambda: others.add([5], SamplingParams(**fields)))
    for word in words:
        assert word in message


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    (found,) = llm.generate([[5] * (CONTEXT - 1)], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(found.answers[0].token_ids) == 1
    assert found.answers[0].finish_reason == "length"


@pytest.mark.parametrize("wrong", [[4096], [-1], [], [True], [2.5], "", None, 7], ids=repr)
def test_one_wrong_prompt_of_several(others: Engine, llm: LLM, wrong: Any) -> None:
    refusal(InputError, lambda: llm.generate(["Hello", wrong, "there"]))


@pytest.mark.parametrize("wrong", [[5, 6.5], [5, None], [None], 7, None, ""], ids=repr)
def test_what_is_no_prompt(llm: LLM, wrong: Any) -> None:
    refusal(InputError, lambda: llm.generate(wrong))


def test_parameters_for_another_number_of_prompts(llm: LLM) -> None:
    message = refusal(InputError, lambda: llm.generate(["a", "b"], [SamplingParams()] * 3))
    assert "2 prompts" in message
    assert "3 sampling parameters" in message


def test_text_without_a_tokenizer(tiny: LLM) -> None:
    assert "no tokenizer" in refusal(InputError, lambda: tiny.generate("Hello"))
    assert "chat template" in refusal(InputError, lambda: tiny.chat([{"role": "user", "content": "Hello"}]))
    message = refusal(InputError, lambda: tiny.generate([[1, 2]], SamplingParams(stop=["end"])))
    assert "stop strings need a tokenizer" in message
    assert "stop_token_ids" in message
    assert tiny.engine.unfinished == 0


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def start(folder: Path, **options: Any) -> Engine:
    return start_engine(folder, EngineOptions(device="cpu", kv_tokens=64, **options))


@pytest.mark.parametrize("name", [f"{UP}.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_missing_and_misshapen_tensors(others: Engine, tiny_model: Path, tmp_path: Path, name: str) -> None:
    less = changed(tiny_model, tmp_path / "less", lambda tensors: tensors.pop(name))
    message = refusal(StorageError, lambda: start(less))
    assert f"tensor {name} is missing in {less}" in message
    other = changed(tiny_model, tmp_path / "other", lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    message = refusal(StorageError, lambda: start(other))
    assert f"tensor {name} in {other} has shape [3, 5]" in message
    assert "config.json" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [f"{UP}.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_plain_weights_that_are_no_numbers(tiny_model: Path, tmp_path: Path, name: str, value: float) -> None:
    broken = changed(tiny_model, tmp_path / "broken", lambda tensors: tensors[name].view(-1)[3:4].fill_(value))
    message = refusal(QuantkitError, lambda: start(broken))
    assert name in message
    assert "NaN" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", SCALES)
def test_scales_that_are_no_numbers(
    others: Engine, quantized: dict[str, Path], tmp_path: Path, recipe: str, value: float
) -> None:
    part = f"{UP}.{SCALES[recipe]}"
    broken = changed(
        quantized[recipe], tmp_path / "broken", lambda tensors: tensors[part].view(-1)[3:4].fill_(value)
    )  # fmt: skip
    message = refusal(QuantkitError, lambda: start(broken))
    assert f"layer {UP} would give garbage" in message
    assert "NaN or Inf" in message


@pytest.mark.parametrize("recipe", SCALES)
def test_quantized_layers_without_scales(quantized: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    """Their codes must not be taken for weights."""
    part = f"{UP}.{SCALES[recipe]}"
    broken = changed(quantized[recipe], tmp_path / "broken", lambda tensors: tensors.pop(part))
    assert UP in refusal(QuantkitError, lambda: start(broken))


@pytest.mark.parametrize("recipe", SCALES)
def test_quantized_layers_with_too_few_scales(quantized: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    part = f"{UP}.{SCALES[recipe]}"

    def halve(tensors: dict[str, Tensor]) -> None:
        tensors[part] = tensors[part][: len(tensors[part]) // 2].clone()

    broken = changed(quantized[recipe], tmp_path / "broken", halve)
    assert UP in refusal(QuantkitError, lambda: start(broken))


def test_quantized_layer_of_another_shape(quantized: dict[str, Path], tmp_path: Path) -> None:
    """Right in itself, but not what config.json asks for."""
    source = quantized["rtn-w4g128"]
    down = "model.layers.1.mlp.down_proj"

    def swap(tensors: dict[str, Tensor]) -> None:
        for part in ("g_idx", "qweight", "qzeros", "scales"):
            tensors[f"{UP}.{part}"] = tensors[f"{down}.{part}"].clone()

    broken = changed(source, tmp_path / "broken", swap)
    message = refusal(StorageError, lambda: start(broken))
    assert f"{UP} in {broken} is a layer of [256, 384], but config.json asks for [384, 256]" in message


def test_a_kernel_that_overflows_is_refused(quantized: dict[str, Path], tmp_path: Path) -> None:
    """Weights that are finite in 32 bit, but not what the layer computes in 16."""
    part = f"{UP}.{SCALES['rtn-w4g128']}"
    broken = changed(quantized["rtn-w4g128"], tmp_path / "broken", lambda tensors: tensors[part].fill_(6e4))
    message = refusal(QuantkitError, lambda: start(broken, dtype="float16"))
    assert f"layer {UP} would give garbage: its kernel is off" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3}, ("model.layers.2.", "missing")),
        ({"hidden_size": 0}, ("hidden_size", "0")),
        ({"vocab_size": 600}, ("model.embed_tokens.weight", "[512, 256]", "[600, 256]")),
        ({"hidden_act": "relu"}, ("relu", "silu")),
        ({"model_type": "llamma"}, ("llamma", "did you mean 'llama'")),
    ],
    ids=str,
)
def test_config_that_does_not_fit(
    tiny_model: Path, tmp_path: Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    message = refusal(InputError, lambda: start(folder))
    for word in words:
        assert word in message


def test_a_cache_that_does_not_fit(others: Engine, tiny_model: Path) -> None:
    options = EngineOptions(device="cpu", kv_tokens=10**12)
    message = refusal(InputError, lambda: start_engine(tiny_model, options))
    for word in ("does not fit", "weights", "cache of", "--kv-tokens", "--max-context", "--memory-share"):
        assert word in message


def test_contexts_that_the_model_or_the_cache_lacks(tiny_model: Path) -> None:
    message = refusal(InputError, lambda: start_engine(tiny_model, EngineOptions(device="cpu", max_context=257)))
    assert "max_context is 257" in message
    assert "256 positions" in message
    small = EngineOptions(device="cpu", max_context=200, kv_tokens=100)
    message = refusal(InputError, lambda: start_engine(tiny_model, small))
    for word in ("112 tokens", "max_context 200", "--max-context", "--kv-tokens"):
        assert word in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, ("'gpu'", "auto, cpu, cuda or cuda:N")),
        ({"device": "cuda:-1"}, ("'cuda:-1'", "auto, cpu, cuda or cuda:N")),
        ({"device": 1}, ("device 1", "auto, cpu, cuda or cuda:N")),
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"kv_dtype": "fp4"}, ("kv_dtype", "fp4", "fp8")),
        ({"max_context": 0}, ("max_context is 0",)),
        ({"max_sequences": True}, ("max_sequences is True",)),
        ({"step_tokens": 1.5}, ("step_tokens is 1.5",)),
        ({"kv_tokens": -1}, ("kv_tokens is -1",)),
        ({"page_size": 24}, ("page_size is 24", "power of two")),
        ({"page_size": 16.0}, ("page_size is 16.0",)),
        ({"memory_share": 1.0}, ("memory_share is 1.0", "0.98")),
        ({"memory_share": float("nan")}, ("memory_share is nan",)),
        ({"swap_gib": -1.0}, ("swap_gib is -1.0",)),
        ({"swap_gib": float("nan")}, ("swap_gib is nan",)),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(InputError, lambda: EngineOptions(**options).torch_device)
    for word in words:
        assert word in message
