"""Perplexity with one fixed protocol, so that every number here compares with every other.

The text is tokenized as it is, without special tokens; windows do not overlap; every token of a window but its first is
predicted from the tokens before it in that window; losses are summed in float64.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.calibration import token_windows
from quantkit.errors import InputError
from quantkit.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Perplexity:
    """A measured loss and the protocol that it was measured by."""

    loss: float  # mean negative log-likelihood per predicted token, nats
    tokens: int  # predicted tokens
    bytes: int  # of text covered by the predicted tokens
    windows: int
    window: int
    text: str

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Compares across tokenizers, which perplexity does not."""
        return self.loss * self.tokens / self.bytes / math.log(2)

    def to_dict(self) -> dict[str, Any]:
        derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return (
            asdict(self) | derived | {"protocol": "no special tokens, windows do not overlap, first token not scored"}
        )


def measure_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text_file: Path,
    *,
    window: int = 1024,
    max_windows: int | None = None,
    on_window: Progress = silent,
) -> Perplexity:
    """Perplexity of a text file, window by window."""
    windows = text_windows(model, tokenizer, text_file, window)[:max_windows]
    total = 0.0
    for index, ids in enumerate(windows):
        total += window_loss(model, ids)
        on_window(f"window {index + 1}", len(windows))
    covered = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in windows)
    tokens = len(windows) * (window - 1)
    return Perplexity(total / tokens, tokens, covered, len(windows), window, text_file.name)


def text_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text_file: Path, window: int
) -> Tensor:  # [windows, window]
    """The windows of a text, after a look at whether the model can take them."""
    limit = getattr(model.config, "max_position_embeddings", window)
    if not 2 <= window <= limit:
        raise InputError(f"a window of {window} tokens does not fit the model; choose 2 to {limit}")
    return token_windows(tokenizer, text_file, window)


@torch.inference_mode()
def window_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:  # [window - 1, vocabulary]
    """Logits of the scored positions, in the model's dtype."""
    logits: Tensor = model(ids[None].to(model.device), use_cache=False).logits
    return logits[0, :-1]


@torch.inference_mode()
def window_loss(model: PreTrainedModel, ids: Tensor) -> float:
    """Summed negative log-likelihood of ids[1:], in nats."""
    logits = window_logits(model, ids).float()
    return float(torch.nn.functional.cross_entropy(logits, ids[1:].to(model.device), reduction="sum").double())
