"""Which tokens are trained on, which are measured on, and where heads are written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.bundled import CALIBRATION_TEXT, HELDOUT_TEXT
from quantkit.calibration import Calibration
from quantkit.checkpoint import INDEX, Checkpoint
from quantkit.errors import InputError
from quantkit.reference import load_tokenizer
from quantkit.sources import BUNDLED, model_folder
from quantkit.token_windows import StartToken, cut_windows, shorter_windows, start_token, text_of

WINDOW = 512  # tokens of text that are computed together
PROMPT = 64  # tokens
PROMPTS = 128  # whose answers are measured
MOST_TOKENS = 400_000  # trained on: their hidden states stay in memory, two bytes a value


@dataclass(frozen=True, eq=False)
class Texts:
    """Token ids of one training."""

    windows: Tensor  # int64 [windows, tokens], trained on
    prompts: Tensor  # int64 [prompts, tokens], of text that is not trained on
    records: list[dict[str, Any]]  # of every source, for the log
    heldout: str  # where the prompts are from
    start: StartToken | None = None  # that all of them begin with

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.windows.shape[1]

    def prompts_to_train(self, count: int) -> Tensor:
        """Beginnings of what is trained on, [count, tokens]; those of all windows first, then what follows them."""
        size = self.prompts.shape[1]
        pieces = shorter_windows(self.windows, size, self.start)
        if count > len(pieces):
            raise InputError(f"the text has {len(pieces)} prompts of {size} tokens, but {count} were asked for")
        return pieces[:count]


def read_texts(
    checkpoint: Checkpoint, sources: Sequence[str | Path], heldout: str | Path | None, seed: int, reserved: int = 0
) -> Texts:
    """Tokens of the texts, through calibration's own reader; `reserved` are left for other sequences."""
    tokenizer = load_tokenizer(checkpoint.folder)
    start = start_token(tokenizer)
    context = int(checkpoint.config.get("max_position_embeddings") or WINDOW)
    window = min(WINDOW, context)
    prompt = min(PROMPT, window // 4)
    chosen = list(sources) or [CALIBRATION_TEXT]
    readers = [
        Calibration(source, (MOST_TOKENS - reserved) // window // len(chosen), window, seed) for source in chosen
    ]
    parts = [reader.tokens(tokenizer, context) for reader in readers]
    records = [reader.record(part, start) for reader, part in zip(readers, parts, strict=True)]
    windows = torch.cat(parts)
    if heldout is None and sources:
        kept = max(1, len(windows) // 10)
        if kept == len(windows):
            raise InputError(
                f"the text has one window of {window} tokens, too little to keep a part out; give more text, "
                "or another one with --heldout"
            )
        windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]
        prompts = cut_windows(text_of(windows[-kept:], start).flatten(), prompt, "the held-out part", start)[:PROMPTS]
        return Texts(windows[:-kept], prompts, records, "a tenth of the text", start)
    source = heldout or HELDOUT_TEXT
    prompts = Calibration(source, PROMPTS, prompt, seed).tokens(tokenizer, context)
    if len(prompts) < 2:
        raise InputError(f"{source} has one prompt of {prompt} tokens; give a longer text with --heldout")
    return Texts(windows, prompts, records, Path(source).name, start)


def choose_output(model: Path, output: str | Path | None) -> Path:
    """The given folder, or the model's own where heads may stand beside the checkpoint."""
    if output is not None:
        folder = Path(output)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"'{output}' is a file; give a folder with -o")
        return folder
    if model.resolve() in [model_folder(name).resolve() for name in BUNDLED]:
        raise InputError("the bundled model's folder stays as it is; say with -o where the heads should go")
    if not os.access(model, os.W_OK):
        raise InputError(f"{model} cannot be written; say with -o where the heads should go")
    if not (model / INDEX).exists() and not (model / "model.safetensors").exists():
        # Readers take every safetensors file of such a folder for a part of the model.
        raise InputError(f"{model} has no model.safetensors and no index; say with -o where the heads should go")
    return model
