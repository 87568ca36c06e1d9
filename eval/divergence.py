"""How far a quantized model's predictions are from the original's: KL divergence, and how often the first choice stays.

The windows are those of `perplexity.py`. Perplexity asks how well a model knows a text; this asks what quantization
changed, also where the change happened to help.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.divergence import token_divergence
from quantkit.errors import InputError
from quantkit.eval.perplexity import text_windows, window_logits
from quantkit.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Divergence:
    """What a model lost against its base, and the protocol that it was measured by."""

    kl: float  # mean over predicted tokens of KL(base || model), nats
    top1_agreement: float  # share of predicted tokens where both models prefer the same one
    tokens: int
    windows: int
    window: int
    text: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"protocol": "KL(base || model) per predicted token in nats, windows as for perplexity"}


def measure_divergence(
    base: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text_file: Path,
    *,
    window: int = 1024,
    max_windows: int | None = 8,
    on_window: Progress = silent,
) -> Divergence:
    """Divergence of `model` from `base` on the first windows of a text."""
    sizes = base.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise InputError(f"the base has {sizes[0]} tokens, the model {sizes[1]}; choose the model it was made from")
    windows = text_windows(model, tokenizer, text_file, window)[:max_windows]
    total, agreed = 0.0, 0
    for index, ids in enumerate(windows):
        expected, logits = window_logits(base, ids), window_logits(model, ids)
        total += float(token_divergence(expected, logits).sum())
        agreed += int((expected.argmax(-1) == logits.argmax(-1)).sum())
        on_window(f"window {index + 1}", len(windows))
    tokens = len(windows) * (window - 1)
    return Divergence(total / tokens, agreed / tokens, tokens, len(windows), window, text_file.name)
