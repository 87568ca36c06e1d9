"""Prompts as people give them, and the token ids that an engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]  # text, or token ids
Message = dict[str, Any]  # {"role": ..., "content": ...}


def encode_prompt(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str | Sequence):
        raise InputError(f"a prompt is {prompt!r}, but must be a text or a list of token ids")
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise InputError("this model folder has no tokenizer; give token ids instead of text")
    return list(tokenizer(prompt, verbose=False)["input_ids"])


def encode_chat(tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Message]) -> list[int]:
    """A conversation through the tokenizer's chat template, open for the answer."""
    if tokenizer is None or not tokenizer.chat_template:
        raise InputError("this model's tokenizer has no chat template; give plain prompts")
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
