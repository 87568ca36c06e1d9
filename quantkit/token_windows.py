"""How token ids become windows, and what each of them begins with.

Where a tokenizer puts a start token before every text (Gemma, Llama 3), its model never saw a text without one, and
guesses badly until enough tokens follow. So every window begins with it there, which is what a server gives the model
too. It takes a place of the window and is never predicted. Tokenizers that add none get none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StartToken(NamedTuple):
    """The token before every text."""

    id: int
    text: str


def start_token(tokenizer: PreTrainedTokenizerBase) -> StartToken | None:
    """What a tokenizer itself puts before a text; None where it puts nothing there, whatever its `bos_token` is."""
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or list(tokenizer("", verbose=False)["input_ids"][:1]) != [first]:
        return None
    return StartToken(int(first), str(tokenizer.bos_token))


def cut_windows(ids: Tensor, window: int, source: str, start: StartToken | None = None) -> Tensor:
    """Token ids [tokens] of a text as [windows, window]; a short rest is dropped."""
    size = text_tokens(window, start)
    if start is not None and len(ids) and int(ids[0]) == start.id:  # a chat template has put it there
        ids = ids[1:]
    count = len(ids) // size
    if count == 0:
        raise InputError(f"{source} has {len(ids)} tokens, less than one window of {window}; use a longer text")
    return _begun(ids[: count * size].view(count, size), start)


def text_tokens(window: int, start: StartToken | None) -> int:
    """How many tokens of a window are text."""
    return window if start is None else window - 1


def text_of(windows: Tensor, start: StartToken | None) -> Tensor:
    """Windows [windows, window] without what they begin with."""
    return windows if start is None else windows[:, 1:]


def shorter_windows(windows: Tensor, length: int, start: StartToken | None) -> Tensor:
    """The first `length` tokens of all windows, then those that follow, each as a window; short rests are dropped."""
    size = text_tokens(length, start)
    pieces = text_of(windows, start).split(size, 1)
    return torch.cat([_begun(piece, start) for piece in pieces if piece.shape[1] == size])


def _begun(text: Tensor, start: StartToken | None) -> Tensor:
    return text if start is None else torch.cat([text.new_full((len(text), 1), start.id), text], 1)
