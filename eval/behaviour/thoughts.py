"""What a model thinks aloud before it answers, between <think> and </think>, as Qwen3, DeepSeek-R1 and others do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from quantkit.runtime.server.tools.parsers import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
_MARKS = re.compile(f"({OPEN}|{CLOSE})")


class Said(NamedTuple):
    """An answer without its thoughts."""

    text: str
    finished: bool  # whether no thought is left open, and something was said


def writes_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model was taught to, and its marks stand in its texts: special tokens do not."""
    return CLOSE in template_text(tokenizer) and CLOSE not in tokenizer.all_special_tokens


def leaves_open(prompt: str) -> bool:
    """Whether a template has begun the thought already, so that the answer only ends it."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


def said(answer: str, *, thinking: bool) -> Said:
    """`thinking`: whether the prompt has begun a thought. An end without a beginning ends one that nobody saw begin."""
    outside: list[str] = []
    for piece in _MARKS.split(answer):
        if piece == OPEN:
            thinking = True
        elif piece == CLOSE:
            outside = outside if thinking else []
            thinking = False
        elif not thinking:
            outside.append(piece)
    text = "".join(outside)
    return Said(text, finished=not thinking and bool(text.strip()))
