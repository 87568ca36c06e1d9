"""A GGUF file as a folder that every command takes: config, tokenizer and a view of its tensors, but no weights.

It is made once, in a folder of the user's cache, and again when the file has changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES

from quantkit.errors import StorageError
from quantkit.gguf_import.config import generation_config, model_config
from quantkit.gguf_import.families import family_of_file
from quantkit.gguf_import.placement import Placement, placements
from quantkit.gguf_import.reader import GgufFile, open_gguf
from quantkit.gguf_import.tokenizer import tokenizer_files
from quantkit.gguf_import.weights import check_types, tensor_types
from quantkit.gguf_view import IMPORT_RECORD, MANIFEST, FileStamp, GgufView, TensorPlace, import_record

_DTYPE = "bfloat16"  # of activations, and of what is not in blocks
_LAYOUT = 1  # of these folders; another number makes them again
_UNFINISHED = "unfinished-"


def gguf_folder(file: str | Path) -> Path:
    """The folder of a GGUF file, which is made where there is none yet."""
    path = Path(file)
    try:
        stamp = FileStamp.of(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    of_file = cache_folder() / _short_hash(stamp.path)
    of_stamp = of_file / _short_hash(f"{stamp.size} {stamp.modified} {_LAYOUT}")
    folder = of_stamp / path.stem
    if not (folder / MANIFEST).exists():
        files = _side_files(path, stamp)
        try:
            of_file.mkdir(parents=True, exist_ok=True)
            _write(of_file, of_stamp, path.stem, *files)
        except OSError as error:
            raise StorageError(f"the folder of {path} cannot be written to {of_file}: {error}") from error
    return folder


def write_view(file: Path, folder: Path) -> None:
    """Puts what the folder of a GGUF file holds into another one."""
    _fill(folder, *_side_files(file, FileStamp.of(file)))


def cache_folder() -> Path:
    return Path.home() / ".cache" / "quantkit" / "gguf"


def _side_files(path: Path, stamp: FileStamp) -> tuple[dict[str, Any], GgufView]:
    """Everything is looked at before the first byte is written."""
    source = open_gguf(path)
    config = model_config(source, _DTYPE)
    places = placements(source, family_of_file(source), config)
    check_types(source, places)
    tokenizer, settings = tokenizer_files(source, config)
    files = {
        "config.json": config,
        "generation_config.json": generation_config(source, config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        IMPORT_RECORD: {**import_record(path, tensor_types(source)), "kept": True},
    }
    view = GgufView(stamp, {place.target: _tensor_place(source, place) for place in places})
    return files, view


def _write(of_file: Path, of_stamp: Path, name: str, files: dict[str, Any], view: GgufView) -> None:
    """Under its name only when it is complete; folders of the file as it was before go."""
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=of_file))
    folder = made / name
    folder.mkdir()
    _fill(folder, files, view)
    for other in of_file.iterdir():
        if other != of_stamp and not other.name.startswith(_UNFINISHED):
            shutil.rmtree(other, ignore_errors=True)
    try:
        made.rename(of_stamp)
    except OSError:
        if not (of_stamp / name / MANIFEST).exists():  # else another process was faster
            raise
        shutil.rmtree(made, ignore_errors=True)


def _fill(folder: Path, files: dict[str, Any], view: GgufView) -> None:
    for file, held in files.items():
        (folder / file).write_text(json.dumps(held, ensure_ascii=False), encoding="utf-8")
    view.write(folder)


def _tensor_place(file: GgufFile, place: Placement) -> TensorPlace:
    tensor = file.tensors[place.source]
    size, nbytes = GGML_QUANT_SIZES[tensor.tensor_type]
    row_bytes = place.shape[-1] // size * nbytes
    at = int(tensor.data_offset) + place.first_row * row_bytes
    return TensorPlace(at, tensor.tensor_type.name, place.shape, row_bytes, place.permuted_heads, place.minus)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
