"""What vLLM is told about each layout. Nothing of vLLM runs here: its answers are rows that a GPU machine writes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.interop.adapters import Adapter, find_adapter
from quantkit.eval.peers.vllm_load import SCORING, VllmAdapter, load_arguments, token_prompts

Make = Callable[..., Path]


@pytest.mark.parametrize(
    ("recipe", "dtype", "packages"),
    [
        (("rtn-w4g128",), "bfloat16", ()),
        (("rtn-w4g128-ct",), "bfloat16", ("compressed-tensors",)),
        (("rtn-w3g128",), "bfloat16", ("compressed-tensors", "humming-kernels")),
        (("rtn-w4g128", "format.sym=false", "format.version=2"), "float16", ()),
        (("nf4",), "bfloat16", ("bitsandbytes",)),
    ],
)
def test_dtype_and_packages(
    recipe: tuple[str, ...], dtype: str, packages: tuple[str, ...], quantized_tiny: Make
) -> None:
    checkpoint = Checkpoint(quantized_tiny(*recipe))
    given = load_arguments(checkpoint, 256)
    assert given["dtype"] == dtype
    assert VllmAdapter().packages(checkpoint) == packages
    assert ("quantization" in given) == ("bitsandbytes" in packages)
    assert given["enforce_eager"]
    assert given["max_model_len"] > 256


def test_prompts_are_token_ids_and_scored() -> None:
    assert token_prompts([[1, 2]]) == [{"prompt_token_ids": [1, 2]}]
    assert SCORING["prompt_logprobs"] == 0


def test_the_adapter_is_found_without_vllm() -> None:
    adapter: Adapter = find_adapter("vLLM", "cpu")
    assert adapter.engine == "vLLM"
    assert adapter.forget()
    with pytest.raises(InputError, match="no adapter for 'SGLang'"):
        find_adapter("SGLang", "cpu")
