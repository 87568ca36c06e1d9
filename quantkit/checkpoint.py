"""Reading checkpoints: a folder of safetensors files, one or many, streamed tensor by tensor.

`Checkpoint` lists what is there from the files' headers and reads a tensor only when asked. It knows which modules are
quantized and in which format, so that callers see layers, not files; experts that lie in one tensor are listed one by
one, and so are tensors that stay in a GGUF file (`gguf_view.py`). Writing is in `checkpoint_writer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantkit.arch import FAMILIES, Family, Slice
from quantkit.errors import InputError, StorageError
from quantkit.formats import Format, Index, Parts, PartSpec, QuantizedWeight, Shape, TensorInfo, dialect_named
from quantkit.formats.base import ANY_LENGTH
from quantkit.formats.kv_scheme import is_of_a_cache
from quantkit.gguf_view import GgufView

INDEX = "model.safetensors.index.json"
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}


# What Python and torch raise when names, types or shapes in a file are not what they should be.
_MALFORMED = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_LOOKED_AT = 1 << 22  # values at a time
_PLAIN = ("F16", "BF16", "F32", "F64")  # dtypes of weights and biases that are not quantized
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # of scales: which one it is, only the file says
_INTEGERS = (torch.int32, torch.int64)


class StoredTensor(NamedTuple):
    """Where a tensor lies and what its header says."""

    file: Path
    info: TensorInfo
    part: Slice | None = None  # of the tensor in the file, where that holds several

    @property
    def nbytes(self) -> int:
        return torch.Size(self.info.shape).numel() * _BYTES.get(self.info.dtype, 8)


class Checkpoint:
    """A model folder, opened for reading. Raises StorageError, naming the file, for anything broken."""

    _kept: dict[Path, Any] | None = None  # files that stay open

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_json(self.folder / "config.json", "a model folder needs one")
        self.gguf = GgufView.read(self.folder)
        if self.gguf is not None:
            self.tensors = {name: StoredTensor(self.gguf.file, one.info) for name, one in self.gguf.places.items()}
        else:
            family = FAMILIES.get(str(self.config.get("model_type")))
            self.tensors = _by_expert(stored_tensors(self.folder), family)

    @property
    def origin(self) -> Path:
        """What to call it to people: the folder, or the GGUF file that it stands for."""
        return self.folder if self.gguf is None else self.gguf.file

    @cached_property
    def formats(self) -> dict[str, Format]:
        """The format of every quantized module; empty for a plain model."""
        config = self.config.get("quantization_config")
        infos = {name: stored.info for name, stored in self.tensors.items()}
        formats: dict[str, Format] = {} if self.gguf is None else {**self.gguf.formats}
        try:
            if config is not None:
                formats = dialect_named(str(config.get("quant_method", "missing"))).read(config, infos)
        except InputError as error:
            raise type(error)(f"{self.folder}: {error}") from error
        except _MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            raise StorageError(f"{self.folder / 'config.json'}: malformed quantization_config ({reason})") from error
        self._check_plain(formats)
        return formats

    def _check_plain(self, formats: Mapping[str, Format]) -> None:
        """Codes that nothing says how to decode would be taken for weights."""
        for name, stored in self.tensors.items():
            module, _, last = name.rpartition(".")
            plain = last == "bias" or (last == "weight" and module not in formats)
            if plain and stored.info.dtype not in _PLAIN and len(stored.info.shape) <= 2:  # masks have more
                raise StorageError(
                    f"tensor {name} in {self.folder} holds {stored.info.dtype} codes without scales, or without a "
                    "word in config.json; the checkpoint is incomplete, quantize or download it again"
                )

    @property
    def dtype(self) -> str:
        """The dtype of the unquantized tensors, in torch's spelling."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        return str(named or "float32").removeprefix("torch.")

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored."""
        if name not in self.tensors:
            raise StorageError(f"tensor {name} is missing in {self.folder}; the checkpoint is incomplete")
        if self.gguf is not None:
            return self.gguf.tensor(name)
        file, _, part = self.tensors[name]
        try:
            with self._open(file) as opened:
                tensor: Tensor = opened.get_tensor(part.stored if part else name)
                return part.take(tensor) if part else tensor
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from error

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Within, every file is opened once. Opening reads the header: 60 ms where it names 20,000 tensors."""
        outermost, self._kept = self._kept is None, self._kept or {}
        try:
            yield
        finally:
            if outermost:
                self._kept = None
            if self.gguf is not None:
                self.gguf.let_go()

    def _open(self, file: Path) -> AbstractContextManager[Any]:
        if self._kept is None:
            return safe_open(file, framework="pt")
        if file not in self._kept:
            self._kept[file] = safe_open(file, framework="pt")
        return nullcontext(self._kept[file])

    def rows(self, name: str, index: Tensor | slice) -> Tensor:
        """Some rows of a tensor. Files are mapped into memory, so the others are never read."""
        return self.tensor(name)[index]

    def part_names(self, module: str) -> list[str]:
        """Full names of the tensors that make up a quantized module's weight."""
        names = (f"{module}.{suffix}" for suffix in self.formats[module].suffixes)
        return [name for name in names if name in self.tensors]

    def parts(self, module: str) -> Parts:
        """The parts of a quantized module as stored."""
        return {name[len(module) + 1 :]: self.tensor(name) for name in self.part_names(module)}

    def quantized(self, module: str, device: str | torch.device = "cpu", *, copies: bool = False) -> QuantizedWeight:
        """A quantized module's weight, free of its layout. On a CPU its parts may lie in the mapped file, wherever they
        begin there, unless `copies` are asked for."""
        with self.naming(module):
            parts = self._checked_parts(module)
            return self.formats[module].unpack({name: part.to(device, copy=copies) for name, part in parts.items()})

    def quantized_part(
        self, module: str, outputs: Index, inputs: Index, device: str | torch.device = "cpu"
    ) -> QuantizedWeight:
        """Some outputs and inputs of a quantized module's weight; of slices, little else is read from the files."""
        with self.naming(module):
            parts, fmt, shape = self._checked_parts(module), self.formats[module], self.layer_shape(module)
            around = fmt.narrow(parts, shape, _span(outputs, shape[0]), _span(inputs, shape[1]))
            weight = fmt.unpack({name: part.to(device) for name, part in around.parts.items()})
            return weight.cut(
                _inside(outputs, around.outputs.start, device), _inside(inputs, around.inputs.start, device)
            )

    def scattered_groups(self, module: str) -> Tensor | None:
        """The group of every input of a quantized module, where act-order scattered them."""
        with self.naming(module):
            return self.formats[module].scattered_groups(self._checked_parts(module))

    def weight(self, module: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
        """A quantized module's weight, decoded on a device."""
        with self.naming(module):
            return self.quantized(module, device).dequantize(dtype)

    def layer_shape(self, module: str) -> Shape:
        """(out, in) of a quantized module, from headers and small parts only."""
        sizes = {name[len(module) + 1 :]: self.tensors[name].info.shape for name in self.part_names(module)}
        with self.naming(module):
            out, inputs = self.formats[module].stored_shape(sizes, lambda part: self.tensor(f"{module}.{part}"))
            if out < 1 or inputs < 1:
                raise ValueError(f"its shape is [{out}, {inputs}]")
            return out, inputs

    def _checked_parts(self, module: str) -> Parts:
        """A module's parts, each in the shape that its format reads; any other would decode to garbage."""
        specs = self.formats[module].readable_parts(self.layer_shape(module))
        return {name: _fitted(name, part, specs.get(name, ())) for name, part in self.parts(module).items()}

    @contextmanager
    def naming(self, module: str) -> Iterator[None]:
        """Parts that do not fit together fail deep inside; this says which layer of which checkpoint it was."""
        try:
            yield
        except _MALFORMED as error:
            reason = f"part {error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
            name = self.formats[module].name
            raise StorageError(f"{module} in {self.folder} is not a valid {name} layer: {reason}") from error

    def plain_names(self) -> list[str]:
        """Tensors that belong to no quantized module's weight, and to no cache, in file order."""
        owned = {name for module in self.formats for name in self.part_names(module)}
        return [name for name in self.tensors if name not in owned and not is_of_a_cache(name)]

    def cache_names(self) -> list[str]:
        """Tensors that belong to a cache of keys and values (`formats/kv_scheme.py`)."""
        return [name for name in self.tensors if is_of_a_cache(name)]

    def replaced(self, tensors: Mapping[str, StoredTensor], formats: Mapping[str, Format]) -> Checkpoint:
        """This model with other tensors, wherever they lie."""
        other = copy(self)
        other.tensors, other.formats = dict(tensors), dict(formats)
        return other

    def decoded(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The whole model as plain weights: (name, tensor) with quantized modules decoded."""
        for name in self.plain_names():
            tensor = self.tensor(name)
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for module in self.formats:
            yield f"{module}.weight", self.weight(module, dtype or torch.float32)

    def side_files(self) -> list[Path]:
        """Tokenizer, generation settings, licence: everything small that travels with the weights."""
        wanted = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")
        more = ("generation_config.json", "chat_template*", "LICENSE*", "NOTICE*")
        return sorted({path for pattern in wanted + more for path in self.folder.glob(pattern) if path.is_file()})


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, from the headers of its files. Where several hold one, the index says which counts."""
    index = _index(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(folder, index):
        for name, stored in read_headers(file):
            if index.get(name, file.name) != file.name:
                continue
            if name in tensors:
                raise StorageError(f"{tensors[name].file} and {file} both hold tensor {name}; remove one of them")
            tensors[name] = stored
    missing = [name for name in index if name not in tensors]
    if missing:
        raise StorageError(
            f"{folder / INDEX} names {len(missing)} tensors that their files do not hold, the first is {missing[0]}"
        )
    return tensors


def _by_expert(tensors: Mapping[str, StoredTensor], family: Family | None) -> dict[str, StoredTensor]:
    """Tensors as files have them, those with all experts of a layer in parts, as the family says."""
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        shape = stored.info.shape
        parts = family.slices(name, shape[0]) if family and len(shape) > 1 else {}
        for part, where in parts.items():
            found[part] = StoredTensor(stored.file, TensorInfo(stored.info.dtype, where.shape(shape)), where)
        if not parts:
            found[name] = stored
    return found


def read_all(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as stored, one by one; each file is opened once."""
    by_file: dict[Path, list[str]] = {}
    for name, stored in tensors.items():
        by_file.setdefault(stored.file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from error


def _fitted(name: str, part: Tensor, specs: Sequence[PartSpec]) -> Tensor:
    """A part in the first shape and kind that it has; dimensions of size 1 may be there or not."""
    for spec in specs:
        same_kind = part.dtype == spec.dtype or any(
            {part.dtype, spec.dtype} <= set(kind) for kind in (_FLOATS, _INTEGERS)
        )
        if same_kind and ANY_LENGTH in spec.shape and part.ndim == 1:
            return part
        if same_kind and [size for size in part.shape if size != 1] == [size for size in spec.shape if size != 1]:
            fitted = part.reshape(spec.shape)
            return fitted if part.is_floating_point() else fitted.to(spec.dtype)
    if specs:
        found, needed = (f"{str(each.dtype)[6:]} {list(each.shape)}" for each in (part, specs[0]))
        raise ValueError(f"{name} is {found}, but {needed} is needed")
    return part  # which nobody reads


def _span(index: Index, size: int) -> slice:
    """A list may have any order, so it spans everything."""
    return index if isinstance(index, slice) else slice(0, size)


def _inside(index: Index, start: int, device: str | torch.device) -> Index:
    """An index as seen from the start of what was read."""
    if isinstance(index, Tensor):
        return index.to(device)
    return slice(index.start - start, index.stop - start)


def read_json(file: Path, need: str) -> dict[str, Any]:
    """A JSON object from a file, or one clear error."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageError(f"{file} is missing; {need}") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise StorageError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


def _index(folder: Path) -> dict[str, str]:
    """The file of every tensor, as a checkpoint of several files has it; empty where there is no index."""
    if not (folder / INDEX).exists():
        return {}
    weight_map = read_json(folder / INDEX, "").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StorageError(f"{folder / INDEX} has no weight_map; download the checkpoint again")
    for name in weight_map.values():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise StorageError(f"{folder / INDEX} names {name!r}, which is no file of this folder; do not trust it")
    return weight_map


def _weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    if index:
        return [folder / name for name in sorted(set(index.values()))]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        extra = (
            "; it holds pickle files, which quantkit does not open: save them as safetensors first" if pickled else ""
        )
        raise StorageError(f"no safetensors file in {folder}{extra}")
    return files


def read_headers(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of one file."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                part = opened.get_slice(name)
                yield name, StoredTensor(file, TensorInfo(part.get_dtype(), tuple(part.get_shape())))
    except (SafetensorError, OSError) as error:
        raise _broken(file, error) from error


def _broken(file: Path, error: Exception) -> StorageError:
    if not file.exists():
        return StorageError(f"{file} is missing; the checkpoint is incomplete, download it again")
    return StorageError(f"{file} is truncated or corrupted ({error}); download or write it again")


def require_finite(name: str, tensor: Tensor) -> None:
    """Refuses NaN and Inf: no method can make sense of them."""
    # On a CPU in parts: what torch makes of an embedding to answer this takes more memory than the embedding.
    parts = tensor.reshape(-1).split(_LOOKED_AT) if tensor.is_cpu and tensor.numel() else (tensor,)
    if tensor.is_floating_point() and not all(bool(torch.isfinite(part).all()) for part in parts):
        bad = int((~torch.isfinite(tensor)).sum())
        raise InputError(f"tensor {name} holds {bad} NaN or Inf values; the source checkpoint is damaged, get it again")
