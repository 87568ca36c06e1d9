"""The one protocol of every quality number here: how a text becomes windows of tokens, and what is counted.

The text is tokenized as it stands, without special tokens; windows do not overlap and a short rest is dropped; every
token of a window but its first is predicted from the tokens before it in that window. Where the tokenizer puts a start
token before every text, each window begins with it (`quantkit/token_windows.py`) and holds one token of text less.
Bytes are those that the predicted tokens stand for, so that bits per byte compare where tokenizers differ. Documents of
a .jsonl file or a folder are packed as in calibration (`quantkit/documents.py`), chats through the model's template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quantkit.calibration import token_windows
from quantkit.defaults import WINDOW
from quantkit.documents import document_ids, hub_rows, is_collection
from quantkit.errors import InputError, StorageError
from quantkit.extras import require
from quantkit.token_windows import StartToken, cut_windows, start_token, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dataset(NamedTuple):
    """A text of the hub that papers report, put together as they do."""

    source: str  # as quantkit/calibration.py names datasets
    texts: int | None  # how many; None: all
    joined_by: str

    @property
    def preparation(self) -> str:
        count = "all" if self.texts is None else f"the first {self.texts:,}"
        return f"{count} texts of {self.source} joined by {self.joined_by!r}"


DATASETS = {
    "wikitext2": Dataset("datasets:Salesforce/wikitext:wikitext-2-raw-v1@test", None, "\n\n"),
    "c4": Dataset("datasets:allenai/c4:en@validation", 1100, " "),
}


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows of one text, in its order."""

    ids: Tensor  # int64 [windows, window]
    text: str
    window_bytes: tuple[int, ...]  # of text behind the predicted tokens of every window
    preparation: str = ""  # how the text was put together, where it is not a file
    start: StartToken | None = None  # that every window begins with
    packed: bool = False  # documents end to end, each with the special tokens of its own

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Predicted ones: all but the first of every window."""
        return len(self) * (self.window - 1)

    @property
    def bytes(self) -> int:
        return sum(self.window_bytes)

    @property
    def protocol(self) -> str:
        made_of = f" ({self.preparation})" if self.preparation else ""
        special, stride = "no BOS or other special tokens", text_tokens(self.window, self.start)
        if self.packed:
            special = "documents packed end to end with their own special tokens"
        if self.start is not None:
            special = f"each begun by {self.start.text}, {special if self.packed else 'no other special tokens'}"
        return (
            f"{self.text}{made_of}: windows {len(self)}, window {self.window} tokens, stride {stride}, {special}, "
            f"first token of a window not scored; {self.tokens:,} tokens counted, {self.bytes:,} bytes"
        )

    def first(self, count: int | None) -> Windows:
        """The first windows; all of them where `count` is None or larger."""
        return replace(self, ids=self.ids[:count], window_bytes=self.window_bytes[:count])


def read_windows(
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path,
    *,
    window: int = WINDOW,
    max_windows: int | None = None,
    begin: bool = True,
) -> Windows:
    """Windows of a UTF-8 text file, of a .jsonl file or a folder, or of `wikitext2` or `c4` through `datasets`.

    The names win over files of the same name; `./c4` is a file. `begin`: with the start token that the tokenizer puts
    before every text, where it does.
    """
    if window < 2:
        raise InputError(f"a window of {window} tokens has nothing to predict; choose 2 or more")
    if max_windows is not None and max_windows < 1:
        raise InputError(f"{max_windows} windows measure nothing; choose 1 or more")
    check_source(source)
    preparation, start = "", start_token(tokenizer) if begin else None
    if str(source) in DATASETS:
        dataset = DATASETS[str(source)]
        ids, name, preparation = _dataset_windows(tokenizer, dataset, window, start), str(source), dataset.preparation
    elif is_collection(str(source)):
        enough = None if max_windows is None else max_windows * window + 1  # a template may begin with a start token
        documents = document_ids(tokenizer, str(source), enough)
        ids, name = cut_windows(documents, window, str(source), start), Path(source).absolute().name
    else:
        ids, name = token_windows(tokenizer, Path(source), window, max_windows, begin=begin), Path(source).name
    ids = ids[:max_windows]
    predicted = tuple(_bytes_predicted(tokenizer, row) for row in ids)
    return Windows(ids, name, predicted, preparation, start, packed=is_collection(str(source)))


def check_source(source: str | Path) -> None:
    """Refuses a text that is not there; costs nothing, so it comes before anything is loaded."""
    if str(source) not in DATASETS and not Path(source).exists():
        known = ", ".join(DATASETS)
        raise StorageError(f"no text '{source}'; give a UTF-8 text file, a .jsonl file, a folder or one of {known}")


def _dataset_windows(
    tokenizer: PreTrainedTokenizerBase, dataset: Dataset, window: int, start: StartToken | None
) -> Tensor:
    require(dataset.source, "calibration")
    texts = []
    try:
        for where, row in islice(hub_rows(dataset.source), dataset.texts):
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise InputError(f"{where} has no text")
            texts.append(row["text"])
    except InputError as error:
        reason = str(error).partition("; ")[0]  # what follows is about calibration
        raise InputError(f"{reason}; or download a text and give its path") from error
    ids = tokenizer(dataset.joined_by.join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return cut_windows(torch.tensor(ids, dtype=torch.long), window, dataset.source, start)


def _bytes_predicted(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> int:
    """Bytes behind all tokens but the first. A difference of two texts: decoders drop a space at the beginning."""
    whole, first = (
        tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False) for part in (ids, ids[:1])
    )
    return len(whole.encode()) - len(first.encode())
