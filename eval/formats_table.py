"""One model in several formats: how large is each, and what does it lose on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.bundled import HELDOUT_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.eval.perplexity import measure_perplexity
from quantkit.inspection import inspect_checkpoint
from quantkit.pipeline import quantize
from quantkit.progress import Progress, silent
from quantkit.reference import load_reference, load_tokenizer
from quantkit.sources import model_folder


@dataclass(frozen=True)
class FormatRow:
    name: str
    bytes: int  # of the whole checkpoint
    bits_per_weight: float  # of the quantized layers, scales and all; of everything where nothing is quantized
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class FormatsTable:
    model: str
    text: str
    protocol: str
    rows: tuple[FormatRow, ...]  # the unquantized model first

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_formats(
    model: str,
    recipes: Sequence[str],
    output: str | Path,
    *,
    text: Path = HELDOUT_TEXT,
    window: int = 1024,
    max_windows: int | None = None,
    on_format: Progress = silent,
) -> FormatsTable:
    """Quantizes `model` by each recipe into a folder under `output` and measures every result the same way."""
    folder = model_folder(model)
    folders = {Checkpoint(folder).dtype: folder} | {recipe: Path(output) / recipe for recipe in recipes}
    rows = []
    for name, path in folders.items():
        if name in recipes:
            quantize(model, name, path, overwrite=True)
        result = measure_perplexity(
            load_reference(path, "float32"), load_tokenizer(folder), text, window=window, max_windows=max_windows
        )
        found = inspect_checkpoint(path)
        bits = found.quantized_bits_per_weight or found.bits_per_weight
        rows.append(FormatRow(name, found.bytes, bits, result.perplexity, result.bits_per_byte))
        on_format(name, len(folders))
    protocol = (
        f"Perplexity of {text.name}: {result.windows} windows of {window} tokens that do not overlap, weights decoded, "
        "float32 arithmetic."
    )
    return FormatsTable(model, text.name, protocol, tuple(rows))
