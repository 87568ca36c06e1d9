"""Commands that start an engine's server, and their flags: data, with the pages it was read from.

Words may hold `{}`, which stands for the value, `{less}` for one less, and `{ones}` for a 1 for each GPU. What an
engine has no flag for is not there. A cache has our names: fp8, int8, int4.

vLLM and SGLang find the quantization in config.json, and SGLang's documentation asks not to name it once more: so their
commands have no --quantization. What they need to be told is the dtype, where a layout has kernels for float16 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantkit.formats import engine_rules as rules
from quantkit.formats.engine_rules import EngineName

Words = tuple[str, ...]


@dataclass(frozen=True)
class ServeCommand:
    """One engine's."""

    start: Words  # up to the model
    sources: tuple[str, ...] = ()  # paths in the engine's project; nothing for quantkit, which is this program
    context: Words = ()
    dtype: Words = ()  # of activations
    quantization: Words = ()  # its value is the checkpoint's `quant_method`; then the engine takes no dtype
    tensor: Words = ()
    pipeline: Words = ()
    port: Words = ()
    chat_template: Words = ()
    kv: Mapping[str, Words] = field(default_factory=dict)
    takes_files: bool = True  # GGUF files


_CACHE = "--kv-cache-dtype"  # SGLang and TGI spell it so too

SERVE_COMMANDS: Mapping[EngineName, ServeCommand] = {
    "transformers": ServeCommand(
        ("transformers", "serve"),
        (rules.TRANSFORMERS_SERVE,),
        dtype=("--dtype", "{}"),
        port=("--port", "{}"),
        takes_files=False,
    ),
    "vLLM": ServeCommand(
        ("vllm", "serve"),
        (rules.VLLM_ENGINE, rules.VLLM_SERVE),
        context=("--max-model-len", "{}"),
        dtype=("--dtype", "{}"),
        tensor=("--tensor-parallel-size", "{}"),
        pipeline=("--pipeline-parallel-size", "{}"),
        port=("--port", "{}"),
        chat_template=("--chat-template", "{}"),
        kv={"fp8": (_CACHE, "fp8")},
    ),
    "SGLang": ServeCommand(
        ("python", "-m", "sglang.launch_server", "--model-path"),
        (rules.SGLANG_SERVE,),
        context=("--context-length", "{}"),
        dtype=("--dtype", "{}"),
        tensor=("--tensor-parallel-size", "{}"),
        pipeline=("--pipeline-parallel-size", "{}"),
        port=("--port", "{}"),
        chat_template=("--chat-template", "{}"),
        kv={"fp8": (_CACHE, "fp8_e4m3")},
    ),
    "TensorRT-LLM": ServeCommand(
        ("trtllm-serve",),
        (rules.TRT_SERVE,),
        context=("--max_seq_len", "{}"),
        tensor=("--tensor_parallel_size", "{}"),
        pipeline=("--pipeline_parallel_size", "{}"),
        port=("--port", "{}"),
        chat_template=("--chat_template", "{}"),
    ),
    "TGI": ServeCommand(
        ("text-generation-launcher", "--model-id"),
        (rules.TGI_SERVE,),
        context=("--max-total-tokens", "{}", "--max-input-tokens", "{less}"),
        dtype=("--dtype", "{}"),
        quantization=("--quantize", "{}"),
        tensor=("--num-shard", "{}"),
        port=("--port", "{}"),
        chat_template=("--tokenizer-config-path", "{}"),
        kv={"fp8": (_CACHE, "fp8_e4m3fn")},
    ),
    "llama.cpp": ServeCommand(
        ("llama-server", "--model"),
        (rules.LLAMA_CPP_SERVE,),
        context=("--ctx-size", "{}"),
        tensor=("--split-mode", "row", "--tensor-split", "{ones}"),
        pipeline=("--split-mode", "layer", "--tensor-split", "{ones}"),
        port=("--port", "{}"),
        chat_template=("--chat-template-file", "{}"),
        kv={
            "int8": ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
            "int4": ("--cache-type-k", "q4_0", "--cache-type-v", "q4_0"),
        },
    ),
    "quantkit": ServeCommand(
        ("quantkit", "serve"),
        context=("--max-context", "{}"),
        tensor=("--tensor-parallel", "{}"),
        pipeline=("--pipeline-parallel", "{}"),
        port=("--port", "{}"),
        kv={name: ("--kv-dtype", name) for name in ("fp8", "int8", "int4")},
    ),
}


@dataclass(frozen=True)
class OllamaFile:
    """Ollama's model is made from a Modelfile; its server takes the rest from the environment."""

    create: Words = ("ollama", "create", "{}", "-f", "Modelfile")
    sources: tuple[str, ...] = (rules.OLLAMA_MODELFILE, rules.OLLAMA_IMPORT, rules.OLLAMA_SERVER)
    source: str = "FROM {}"
    context: str = "PARAMETER num_ctx {}"
    chat_template: str = 'TEMPLATE """{}"""'  # in Go's language of templates
    port: str = "OLLAMA_HOST=127.0.0.1:{}"
    kv: Mapping[str, str] = field(
        default_factory=lambda: {"int8": "OLLAMA_KV_CACHE_TYPE=q8_0", "int4": "OLLAMA_KV_CACHE_TYPE=q4_0"}
    )


def fill(words: Words, value: object) -> Words:
    """The words of a flag with its value."""
    number = value if isinstance(value, int) else 0
    return tuple(word.format(value, less=number - 1, ones=",".join("1" * number)) for word in words)
