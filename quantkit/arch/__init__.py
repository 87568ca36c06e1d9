"""Model families as data: what the quantizer and the runtime must know about a model beyond its config.json.

All supported families are the same decoder with different settings, so a family is a value, not a class of its own.
To add one: read its modelling code in transformers, write its `Family` in the file of its kind, add it to `FAMILIES`;
the tests compare every field with a small model built by transformers.
"""

from __future__ import annotations

from quantkit.arch.dense import GEMMA2, GEMMA3_TEXT, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from quantkit.arch.family import Family
from quantkit.arch.fused import Slice
from quantkit.arch.latent import DEEPSEEK_V2, DEEPSEEK_V3
from quantkit.arch.routed import GLM4_MOE, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from quantkit.arch.sizes import Config
from quantkit.errors import InputError, did_you_mean

__all__ = [
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "FAMILIES",
    "GEMMA2",
    "GEMMA3_TEXT",
    "GLM4_MOE",
    "GPT_OSS",
    "LLAMA",
    "MISTRAL",
    "MIXTRAL",
    "PHI3",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "Config",
    "Family",
    "Slice",
    "family_of",
]

_DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3_TEXT, PHI3)
_ROUTED = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3)
FAMILIES = {family.model_type: family for family in _DENSE + _ROUTED}


def family_of(config: Config) -> Family:
    """The family of a model, from its config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"config.json has no model_type; known families: {', '.join(sorted(FAMILIES))}")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if "text_config" in config:
        raise InputError(
            f"model_type '{model_type}' takes more than text; only the text families are supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    raise InputError(f"model_type '{model_type}' is not supported; {did_you_mean(model_type, FAMILIES)}")
