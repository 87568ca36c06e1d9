"""Calibration data: which tokens a method looks at, chosen once and recorded, so that two methods compare fairly."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.errors import InputError, StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Calibration:
    """Where the tokens come from: `samples` windows of `seq_len` tokens, drawn from a text by `seed`."""

    text: Path = CALIBRATION_TEXT
    samples: int = 128
    seq_len: int = 512
    seed: int = 0

    def tokens(self, tokenizer: PreTrainedTokenizerBase, context: int) -> Tensor:
        """Token ids [samples, seq_len]; fewer samples where the text has no more."""
        if not 2 <= self.seq_len <= context:
            raise InputError(f"calibration sequences of {self.seq_len} tokens do not fit; choose 2 to {context}")
        if self.samples < 1:
            raise InputError(f"calibration with {self.samples} samples; choose 1 or more")
        windows = token_windows(tokenizer, self.text, self.seq_len)
        chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(self.seed))[: self.samples]
        return windows[chosen]

    def record(self, tokens: Tensor) -> dict[str, Any]:
        """What a log must hold to repeat this."""
        digest = hashlib.sha256(tokens.to(torch.int32).numpy().tobytes()).hexdigest()
        return {
            "text": self.text.name,
            "samples": tokens.shape[0],
            "seq_len": self.seq_len,
            "seed": self.seed,
            "tokens_sha256": digest,
        }


def token_windows(tokenizer: PreTrainedTokenizerBase, text_file: Path, window: int) -> Tensor:
    """A text as whole windows of token ids [windows, window], without special tokens; a short rest is dropped."""
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read the text {text_file}: {error}") from error
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    count = len(ids) // window
    if count == 0:
        raise InputError(f"{text_file} has {len(ids)} tokens, less than one window of {window}; use a longer text")
    return ids[: count * window].view(count, window)
