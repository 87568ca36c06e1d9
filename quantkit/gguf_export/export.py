"""From a model folder to a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import GGML_QUANT_VERSION, LlamaFileType
from torch import Tensor

from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.errors import InputError, did_you_mean
from quantkit.gguf_export.codes import as_blocks, block_kind
from quantkit.gguf_export.file import FileTensor, check_file, write_gguf
from quantkit.gguf_export.metadata import ARCHITECTURES, exportable_family, filled_config, model_keys, window_note
from quantkit.gguf_export.rope import rope_tables
from quantkit.gguf_export.tensors import arranged, tensor_places
from quantkit.gguf_export.tokenizer import tokenizer_keys
from quantkit.gguf_import.placement import Placement
from quantkit.progress import Progress, silent
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder

_PLAIN_FILES = {"F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16}


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    output: str
    source_format: str
    matrices: int
    tensor_types: dict[str, int]  # how many tensors of each type, most frequent first
    bytes: int
    exact: bool  # whether no number was rounded
    notes: tuple[str, ...]  # what llama.cpp will do otherwise than this model's makers


@dataclass(frozen=True)
class Exported:
    """A model as a GGUF file has it, but for the types of its tensors."""

    source: Checkpoint
    architecture: str
    keys: Mapping[str, Any]
    places: tuple[Placement, ...]
    tables: Mapping[str, Tensor]  # tensors that the folder does not have
    notes: tuple[str, ...]


def exported(source: Checkpoint, model: str | Path) -> Exported:
    """Everything that can be refused is refused here. `model`: as it was named."""
    family = exportable_family(source.config)
    config = filled_config(source.config)
    places = tuple(tensor_places(source, family, config))
    vocabulary, split_note = tokenizer_keys(load_tokenizer(source.folder), source.folder, config["vocab_size"])
    keys = {
        "general.type": "model",
        "general.name": Path(model).absolute().name,
        "general.quantization_version": GGML_QUANT_VERSION,
        **model_keys(family, config),
        **vocabulary,
    }
    notes = tuple(note for note in (split_note, window_note(family, config)) if note)
    tables = rope_tables(config, family.size_of_head(config))
    return Exported(source, ARCHITECTURES[family.model_type], keys, places, tables, notes)


def write_model(
    model: Exported,
    output: Path,
    file_type: LlamaFileType,
    tensor: Callable[[Placement], FileTensor],
    *,
    exact: bool,
    more: Mapping[str, Any] = MappingProxyType({}),
    changed: Callable[[Placement], Tensor | None] = lambda place: None,
    overwrite: bool = False,
    on_tensor: Progress = silent,
    verify: Callable[[Path], None] = lambda file: None,
) -> ExportReport:
    """Writes a file whose matrices are those that `tensor` says; vectors and tables are float32. `more`: further keys;
    `changed`: a vector that is not the folder's; `verify` reads the file before it gets its name."""
    tables = [
        FileTensor(name, tuple(table.shape), "F32", partial(_same, table)) for name, table in model.tables.items()
    ]
    tensors = [
        tensor(place) if len(place.shape) > 1 else plain_tensor(model.source, place, "F32", changed)
        for place in model.places
    ]
    keys = {**model.keys, "general.file_type": int(file_type), **more}
    options: dict[str, Any] = {"overwrite": overwrite, "on_tensor": on_tensor, "verify": verify}
    size = write_gguf(output, model.architecture, keys, [*tables, *tensors], **options)
    names = [one.type for one in (*tables, *tensors)]
    types = {name: names.count(name) for name in sorted(set(names), key=lambda name: (-names.count(name), name))}
    matrices = sum(len(place.shape) > 1 for place in model.places)
    return ExportReport(str(output), _format_of(model.source), matrices, types, size, exact, model.notes)


def plain_tensor(
    source: Checkpoint,
    place: Placement,
    kind: str,
    changed: Callable[[Placement], Tensor | None] = lambda place: None,
) -> FileTensor:
    """A tensor of the folder, or what it was changed to, in one of the types without blocks."""

    def make() -> Tensor:
        other = changed(place)
        tensor = source.tensor(place.target) if other is None else other
        require_finite(place.target, tensor)
        return arranged(tensor, place)

    return FileTensor(place.source, place.shape, kind, make)


def export_gguf(
    model: str | Path,
    output: str | Path,
    *,
    kind: str | None = None,
    overwrite: bool = False,
    on_tensor: Progress = silent,
) -> ExportReport:
    """Writes a model as it is: codes as blocks, where they fit without loss, and other matrices as `kind`: F32, F16 or
    BF16, by default the one of the folder."""
    check_file(Path(output), overwrite)
    source = Checkpoint(model_folder(model))
    if kind is not None and kind not in _PLAIN_FILES:
        raise InputError(f"tensor type '{kind}' is not known here; {did_you_mean(kind, _PLAIN_FILES)}")
    found = exported(source, model)
    kinds = {f"{module}.weight": block_kind(module, fmt) for module, fmt in source.formats.items()}

    def tensor(place: Placement) -> FileTensor:
        if place.target not in kinds:
            return plain_tensor(source, place, kind or stored[place.target])
        return FileTensor(place.source, place.shape, kinds[place.target], lambda: _blocks(source, place, kinds))

    stored = {place.target: _stored(source, place) for place in found.places if len(place.shape) > 1}
    plain = {kind or dtype for name, dtype in stored.items() if name not in kinds}
    mostly = file_type(next(iter(kinds.values()))) if kinds else _PLAIN_FILES[min(plain)]
    exact = kind in (None, "F32") or {dtype for name, dtype in stored.items() if name not in kinds} == {kind}
    return write_model(found, Path(output), mostly, tensor, exact=exact, overwrite=overwrite, on_tensor=on_tensor)


def _blocks(source: Checkpoint, place: Placement, kinds: Mapping[str, str]) -> Tensor:
    """Rows of a quantized layer as they stand in the file."""
    module = place.target.removesuffix(".weight")
    return arranged(as_blocks(module, source.quantized(module), kinds[place.target]), place)


def file_type(name: str) -> LlamaFileType:
    """What llama.cpp calls a file whose matrices are mostly of this type, or of this mix."""
    full = f"MOSTLY_{name.upper()}"
    return LlamaFileType[full if full in LlamaFileType.__members__ else f"{full}_S"]


def _stored(source: Checkpoint, place: Placement) -> str:
    """The type of a tensor in the folder; of others than GGUF has, float32 holds every number."""
    dtype = source.tensors[place.target].info.dtype if place.target in source.tensors else "F32"
    return dtype if dtype in _PLAIN_FILES else "F32"


def _format_of(source: Checkpoint) -> str:
    return ", ".join(sorted({fmt.name for fmt in source.formats.values()})) or source.dtype


def _same(table: Tensor) -> Tensor:
    return table
