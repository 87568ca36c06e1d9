"""The tokenizer of a model folder, loaded without what it does not need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.checkpoint import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # tokenizer.json says it all


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """None for a folder without one: such a model takes and gives token ids."""
    if not any(folder.glob("tokenizer*")):
        return None
    file = folder / "tokenizer_config.json"
    named = read_json(file, "").get("tokenizer_class") if file.exists() else None
    if named in _GENERIC_TOKENIZERS and (folder / "tokenizer.json").exists():  # Auto would import seconds of modules
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
