"""Which tokens a draft model shares with the target, where their vocabularies are not quite the same.

Models of one family share a tokenizer, but pad their embeddings to other sizes (Qwen2.5: 151,936 rows at 0.5B, 152,064
at 7B) or add tokens. So the draft's rows are put into the target's order when it is loaded: it reads and guesses in the
target's numbers, and what it guesses from has the target's width, as rejection sampling asks. A token that the draft
does not have reads as its first one and is never guessed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.runtime.model.embedding import EMBEDDING
from quantkit.runtime.model.lm_head import NAME as HEAD
from quantkit.runtime.output.tokenizer import load_tokenizer

MOST_DIFFERENT = 0.01  # of the target's tokens, which the draft lacks or numbers otherwise
UNKNOWN = -1


def match_tokens(target: Path, vocab: int, draft: Path, draft_vocab: int, named: str) -> list[int] | None:
    """The draft's number of each token of the target, `UNKNOWN` of one that it lacks; None where all are the same.

    Folders without a tokenizer say nothing about their tokens: there sizes must be the same.
    """
    own, other = load_tokenizer(target), load_tokenizer(draft)
    if own is None or other is None:
        if vocab == draft_vocab:
            return None
        raise InputError(
            f"the draft {named} has {draft_vocab} tokens, the model {vocab}, and no tokenizers in both folders say "
            "which of them are the same; a draft needs the same tokens"
        )
    ours, theirs = own.get_vocab(), other.get_vocab()
    different = [token for token, number in ours.items() if theirs.get(token) != number]
    if len(different) > MOST_DIFFERENT * len(ours):
        raise InputError(
            f"the draft {named} numbers tokens otherwise than the model ({len(different)} of {len(ours)}, the first: "
            f"{different[0]!r}); its guesses would mean other words; use a draft with the same tokenizer"
        )
    tokens = {number: token for token, number in ours.items()}
    used = set(theirs.values())
    found = []
    for number in range(vocab):
        padding = UNKNOWN if number in used else number
        same = theirs.get(tokens[number], UNKNOWN) if number in tokens else padding
        found.append(same if same < draft_vocab else UNKNOWN)
    return None if vocab == draft_vocab and found == list(range(vocab)) else found


class Renumbered(Checkpoint):
    """A checkpoint whose tokens have the numbers of another model's."""

    def __init__(self, whole: Checkpoint, numbers: list[int]) -> None:
        """`numbers`: which row of the files each token has, or `UNKNOWN`."""
        super().__init__(whole.folder)
        self._rows = torch.tensor(numbers).clamp(min=0)
        self._names = (f"{EMBEDDING}.weight", f"{HEAD}.weight")
        coded = next((name for name in (EMBEDDING, HEAD) if name in self.formats), None)
        if coded is not None:
            raise InputError(
                f"the draft {whole.folder} has other tokens than the model and {coded} in {self.formats[coded]}, whose "
                "rows cannot be put into another order; use a draft that keeps it in 16 bits"
            )

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        return found[self._rows] if name in self._names else found
