"""What a rule about another engine is made of: the engine, what it says, and where that was read.

Rules stand beside the format or dialect that they concern (`Format.refusals`, `Dialect.readers` and `refusals`), those
over several layers in engines.py. A rule names its source by a path in the engine's repository; `PROJECTS` says in
which state that file or page was read, and when. Where nobody found a source the verdict is "unknown", never a yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

EngineName = Literal["quantkit", "transformers", "vLLM", "SGLang", "TensorRT-LLM", "TGI", "llama.cpp", "Ollama"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
OTHERS = ENGINES[1:]

# Wordings that several rules share.
TRT_READS_ITS_OWN = "reads ModelOpt's configs, FP8, MXFP4 and compressed-tensors, no other method; use the recipe fp8"
_AUGUST, _NOVEMBER = "2026-08", "2026-11-18"


class Read(NamedTuple):
    """In which state a source was read, and when."""

    version: str  # a release, or a commit in the network of the repository
    date: str


@dataclass(frozen=True)
class Project:
    """Where an engine is made, and what was read there, by path."""

    repository: str
    read: Mapping[str, Read]
    note: str = ""  # for everyone who means to use it


class Refusal(NamedTuple):
    """What speaks against an engine's loading a layer, a dialect, or a checkpoint."""

    engine: EngineName
    reason: str
    source: str  # a path of the engine's project
    certain: bool = True  # False: the source leaves the question open


def leaves_experts_out(source: str) -> Refusal:
    """Seen with transformers 5.22 (docs/reference/interop.md)."""
    said = "leaves quantized experts out and goes on with random ones; use compressed-tensors without zero points"
    return Refusal("transformers", said, source)


_VLLM, _SGLANG = "vllm/model_executor", "python/sglang/srt"
_TRT, _TGI = "tensorrt_llm", "server/text_generation_server"

TRANSFORMERS_GPTQ = "src/transformers/quantizers/quantizer_gptq.py"
TRANSFORMERS_AWQ = "src/transformers/quantizers/quantizer_awq.py"
TRANSFORMERS_CT = "src/transformers/quantizers/quantizer_compressed_tensors.py"
TRANSFORMERS_BNB = "src/transformers/quantizers/quantizer_bnb_4bit.py"
TRANSFORMERS_MXFP4 = "src/transformers/quantizers/quantizer_mxfp4.py"
TRANSFORMERS_GGUF = "src/transformers/modeling_gguf_pytorch_utils.py"
TRANSFORMERS_MODELS = "src/transformers/models"
TRANSFORMERS_SERVE = "src/transformers/cli/serve.py"
VLLM_GPTQ = f"{_VLLM}/layers/quantization/gptq_marlin.py"
VLLM_MARLIN = f"{_VLLM}/layers/quantization/utils/marlin_utils.py"
VLLM_GPTQ_NAMES = f"{_VLLM}/layers/quantization/utils/gptq_utils.py"
VLLM_CT = f"{_VLLM}/layers/quantization/compressed_tensors/compressed_tensors.py"
VLLM_CT_WEIGHTS = f"{_VLLM}/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py"
VLLM_CT_W4A8 = f"{_VLLM}/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a8_fp8.py"
VLLM_BNB = "docs/features/quantization/bnb.md"
VLLM_GGUF = "docs/features/quantization/gguf.md"
VLLM_MXFP4 = f"{_VLLM}/layers/quantization/mxfp4.py"
VLLM_MODELS = f"{_VLLM}/models"
VLLM_ENGINE = "vllm/engine/arg_utils.py"
VLLM_SERVE = "vllm/entrypoints/openai/cli_args.py"
SGLANG_GPTQ = f"{_SGLANG}/layers/quantization/gptq/gptq.py"
SGLANG_AWQ = f"{_SGLANG}/layers/quantization/awq/awq.py"
SGLANG_CT = f"{_SGLANG}/layers/quantization/compressed_tensors/compressed_tensors.py"
SGLANG_CT_WEIGHTS = f"{_SGLANG}/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py"
SGLANG_CT_MXFP4 = f"{_SGLANG}/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a16_mxfp4.py"
SGLANG_BNB = f"{_SGLANG}/layers/quantization/bitsandbytes.py"
SGLANG_MXFP4 = f"{_SGLANG}/layers/quantization/mxfp4.py"
SGLANG_MODELS = f"{_SGLANG}/models"
SGLANG_SERVE = "docs/advanced_features/server_arguments.md"
TRT_CONFIG = f"{_TRT}/llmapi/llm_utils.py"
TRT_CT = f"{_TRT}/models/quant_config_utils.py"
TRT_MODELS = "docs/source/models/supported-models.md"
TRT_SERVE = f"{_TRT}/commands/serve.py"
TGI_METHODS = f"{_TGI}/utils/quantization.py"
TGI_MARLIN = f"{_TGI}/layers/marlin/gptq.py"
TGI_TRITON = f"{_TGI}/layers/gptq/triton.py"
TGI_CT = f"{_TGI}/layers/compressed_tensors/loader.py"
TGI_CT_WEIGHTS = f"{_TGI}/layers/compressed_tensors/wna16_int.py"
TGI_CT_FLOAT8 = f"{_TGI}/layers/compressed_tensors/w8an_fp.py"
TGI_GGUF = "docs/source/backends/llamacpp.md"
TGI_MODELS = "README.md"
TGI_SERVE = "docs/source/reference/launcher.md"
LLAMA_CPP_FILES = "docs/models.md"
LLAMA_CPP_SERVE = "tools/server/README.md"
OLLAMA_IMPORT = "docs/import.mdx"
OLLAMA_MODELFILE = "docs/modelfile.mdx"
OLLAMA_SERVER = "docs/faq.mdx"

_TRANSFORMERS_READ = Read("5.22", _AUGUST)
_VLLM_READ = Read("0.26.0", _AUGUST)
_SGLANG_READ = Read("main", _AUGUST)

PROJECTS: Mapping[EngineName, Project] = {
    "transformers": Project(
        "huggingface/transformers",
        {
            TRANSFORMERS_GPTQ: _TRANSFORMERS_READ,
            TRANSFORMERS_AWQ: _TRANSFORMERS_READ,
            TRANSFORMERS_CT: _TRANSFORMERS_READ,
            TRANSFORMERS_BNB: _TRANSFORMERS_READ,
            TRANSFORMERS_MXFP4: _TRANSFORMERS_READ,
            TRANSFORMERS_MODELS: _TRANSFORMERS_READ,
            TRANSFORMERS_GGUF: Read("5.23.0", _NOVEMBER),
            TRANSFORMERS_SERVE: Read("5.23.0", _NOVEMBER),
        },
    ),
    "vLLM": Project(
        "vllm-project/vllm",
        {
            VLLM_GPTQ: Read("00161ce01fe6", _NOVEMBER),
            VLLM_MARLIN: Read("007d50058a06", _NOVEMBER),
            VLLM_GPTQ_NAMES: _VLLM_READ,
            VLLM_CT: _VLLM_READ,
            VLLM_CT_WEIGHTS: _VLLM_READ,
            VLLM_CT_W4A8: Read("055e47c28003", "2026-11-19"),
            VLLM_BNB: _VLLM_READ,
            VLLM_GGUF: Read("06fed1cf05a7", _NOVEMBER),
            VLLM_MXFP4: _VLLM_READ,
            VLLM_MODELS: _VLLM_READ,
            VLLM_ENGINE: Read("0.26.0", "2026-11"),
            VLLM_SERVE: Read("005223338608", _NOVEMBER),
        },
    ),
    "SGLang": Project(
        "sgl-project/sglang",
        {
            SGLANG_GPTQ: Read("0cdfa2f8363e", _NOVEMBER),
            SGLANG_AWQ: _SGLANG_READ,
            SGLANG_CT: _SGLANG_READ,
            SGLANG_CT_WEIGHTS: Read("255632ef1ddf", _NOVEMBER),
            SGLANG_CT_MXFP4: Read("0104cc50eeb0", _NOVEMBER),
            SGLANG_BNB: _SGLANG_READ,
            SGLANG_MXFP4: _SGLANG_READ,
            SGLANG_MODELS: _SGLANG_READ,
            SGLANG_SERVE: Read("004813e1dd46", _NOVEMBER),
        },
    ),
    "TensorRT-LLM": Project(
        "NVIDIA/TensorRT-LLM",
        {
            TRT_CONFIG: Read("0066b2a5696f", _NOVEMBER),
            TRT_CT: Read("21156a7a57ac", _NOVEMBER),
            TRT_MODELS: Read("00b6d5a25c30", _NOVEMBER),
            TRT_SERVE: Read("00209af149e7", _NOVEMBER),
        },
    ),
    "TGI": Project(
        "huggingface/text-generation-inference",
        {
            TGI_METHODS: Read("05d0aa678ec8", _NOVEMBER),
            TGI_MARLIN: Read("1629d0bb6d04", _NOVEMBER),
            TGI_TRITON: Read("cece8635f8ec", _NOVEMBER),
            TGI_CT: Read("b2dc10aea507", _NOVEMBER),
            TGI_CT_WEIGHTS: Read("575af7e67210", _NOVEMBER),
            TGI_CT_FLOAT8: Read("575af7e67210", _NOVEMBER),
            TGI_GGUF: Read("1641c22af8e7", _NOVEMBER),
            TGI_MODELS: Read("01b82b58d2a9", _NOVEMBER),
            TGI_SERVE: Read("032fc4c4cf25", _NOVEMBER),
        },
        note="in maintenance mode since December 2025",
    ),
    "llama.cpp": Project(
        "ggml-org/llama.cpp",
        {LLAMA_CPP_FILES: Read("eb757cf38d1a", _NOVEMBER), LLAMA_CPP_SERVE: Read("00dc8057ab28", _NOVEMBER)},
    ),
    "Ollama": Project(
        "ollama/ollama",
        {
            OLLAMA_IMPORT: Read("188594126c5e", _NOVEMBER),
            OLLAMA_MODELFILE: Read("071c82b16659", _NOVEMBER),
            OLLAMA_SERVER: Read("00182b504e9e", _NOVEMBER),
        },
    ),
}

# Who reads weights in 16 bits, of the families that its own list names.
PLAIN_READERS: Mapping[EngineName, str] = {
    "transformers": TRANSFORMERS_MODELS,
    "vLLM": VLLM_MODELS,
    "SGLang": SGLANG_MODELS,
    "TensorRT-LLM": TRT_MODELS,
    "TGI": TGI_MODELS,
}
