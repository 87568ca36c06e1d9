"""Compiled kernels as one file, to be copied to another machine: a tar of what Triton's cache holds of them.

    manifest.json                 {"format", "quantkit", "triton", "build", "target", "sources": {kernel: key of its
                                  source}, "files": {path in the archive: sha256}}
    kernels/<entry>/<name>.json   what Triton knows of a kernel, `entry` being its key in the cache, 64 hex digits
    kernels/<entry>/<name>.cubin  its code

Entries go through Triton's own cache, so no path of an archive is ever a path of the machine. A key holds the source,
the arguments' kinds, the target and the build of Triton: an entry that does not fit is never found, and an archive of
such entries is refused before anything is written. Kernels are programs: install archives of people you trust.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager

from quantkit.errors import InputError, StorageError
from quantkit.kernels.compiling.keys import settle_keys
from quantkit.kernels.compiling.pool import Compiled
from quantkit.kernels.compiling.recording import Kernel

FORMAT = "quantkit-kernels-1"
LARGEST_FILE = 64 << 20
LARGEST_MANIFEST = 8 << 20
MOST_FILES = 20_000
MOST_BYTES = 4 << 30
_PATH = re.compile(r"kernels/([0-9a-f]{64})/([A-Za-z_][A-Za-z0-9_]{0,149})\.(json|cubin)")
_KERNEL = re.compile(r"(quantkit\.kernels(?:\.[a-z0-9_]+)+):([A-Za-z0-9_]+)")


@dataclass(frozen=True)
class Summary:
    """Of an archive that was written or installed."""

    kernels: int
    new: int  # of these, that the cache did not have
    bytes: int
    target: str


def build_of_triton() -> str:
    """What is the same for two installations that make the same code: Triton's sources and its compiler."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()


def write_archive(file: str | Path, kernels: Sequence[Kernel], compiled: Sequence[Compiled]) -> Summary:
    """Of kernels that the cache has."""
    found: dict[str, bytes] = {}
    for one in compiled:
        group = get_cache_manager(one.entry).get_group(f"{one.name[:150]}.json") if one.entry else None
        for name, place in (group or {}).items():
            if name.endswith((".json", ".cubin")):
                found[f"kernels/{one.entry}/{name}"] = Path(place).read_bytes()
    target = f"sm_{kernels[0].target.arch}"
    manifest = {
        "format": FORMAT,
        "quantkit": version("quantkit"),
        "triton": triton.__version__,
        "build": build_of_triton(),
        "target": target,
        "sources": {name_of(kernel.source.fn): kernel.source.fn.cache_key for kernel in kernels},
        "files": {path: hashlib.sha256(data).hexdigest() for path, data in found.items()},
    }
    try:
        with tarfile.open(file, "w:gz", compresslevel=3) as tar:
            _put(tar, "manifest.json", json.dumps(manifest, indent=1).encode())
            for path, data in found.items():
                _put(tar, path, data)
    except OSError as error:
        raise StorageError(f"cannot write {file}: {error.strerror or error}") from error
    entries = {path.split("/")[1] for path in found}
    return Summary(len(entries), len(entries), sum(map(len, found.values())), target)


def install_archive(file: str | Path, target: str | None) -> Summary:
    """Into Triton's cache. Refuses archives for another target (None: any), Triton or kernels, in one line."""
    manifest, data = _read(Path(file))
    _check_manifest(str(file), manifest, target)
    entries: dict[str, dict[str, bytes]] = {}
    for path, content in data.items():
        _, entry, name = path.split("/")
        entries.setdefault(entry, {})[name] = content
    new = 0
    for entry, files in entries.items():
        manager, (metadata,) = get_cache_manager(entry), [name for name in files if name.endswith(".json")]
        if manager.get_group(metadata) is None:
            manager.put_group(metadata, {name: manager.put(content, name) for name, content in _text(files)})
            new += 1
    return Summary(len(entries), new, sum(map(len, data.values())), manifest["target"])


def name_of(function: Any) -> str:
    """Of the function of a kernel."""
    return f"{function.__module__}:{function.__qualname__}"


def _put(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _text(files: Mapping[str, bytes]) -> Iterable[tuple[str, bytes | str]]:
    """Metadata as text, as Triton writes it."""
    return ((name, content.decode() if name.endswith(".json") else content) for name, content in files.items())


def _read(file: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the files that it lists, none of which is something else than it says."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(file, "r:gz") as tar:
            total = 0
            for member in tar:
                limit = LARGEST_MANIFEST if member.name == "manifest.json" else LARGEST_FILE
                total += member.size
                if member.name != "manifest.json" and _PATH.fullmatch(member.name) is None:
                    raise StorageError(f"{file} is no archive of kernels: it has a file {member.name[:80]!r}")
                if not member.isreg() or member.name in found:
                    raise StorageError(f"{file}: {member.name} is no plain file, or is there twice; copy it again")
                if member.size > limit or len(found) > MOST_FILES or total > MOST_BYTES:
                    raise StorageError(f"{file}: {member.name} is larger than any kernel, or there are too many")
                content = tar.extractfile(member)
                assert content is not None
                found[member.name] = content.read()
        manifest = json.loads(found.pop("manifest.json"))
    except FileNotFoundError as error:
        raise InputError(f"no file at {file}; `quantkit warm-up MODEL --to {file}` makes one") from error
    except (tarfile.TarError, KeyError, ValueError, EOFError, OSError) as error:
        raise StorageError(f"{file} is no archive of kernels, or was cut short ({error}); copy it again") from error
    return manifest, _checked_files(file, manifest, found)


def _checked_files(file: Path, manifest: Any, found: dict[str, bytes]) -> dict[str, bytes]:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StorageError(f"{file} is no archive of kernels that this version reads ({FORMAT}); make it again")
    listed = manifest.get("files")
    if not isinstance(listed, dict) or listed.keys() != found.keys():
        raise StorageError(f"{file}: its files are not those of its manifest; copy it again")
    for path, content in found.items():
        if hashlib.sha256(content).hexdigest() != listed[path]:
            raise StorageError(f"{file}: {path} is damaged; copy it again")
    entries = [path.rpartition(".") for path in found]
    pairs = {stem: {end for other, _, end in entries if other == stem} for stem, _, _ in entries}
    if any(ends != {"json", "cubin"} for ends in pairs.values()) or len({stem.split("/")[1] for stem in pairs}) < len(
        pairs
    ):
        raise StorageError(f"{file}: a kernel lacks its code or its description; make it again")
    return found


def _check_manifest(file: str, manifest: Mapping[str, Any], target: str | None) -> None:
    if manifest.get("triton") != triton.__version__:
        raise InputError(
            f"{file} is of Triton {manifest.get('triton')}, here is {triton.__version__}, which would not find its "
            "kernels; make it with the same Triton"
        )
    if manifest.get("build") != build_of_triton():
        raise InputError(f"{file} is of another build of Triton {triton.__version__}; make it with the same wheel")
    if target is not None and manifest.get("target") != target:
        raise InputError(f"{file} is for {manifest.get('target')}, but this GPU is {target}; make it with its --gpu")
    settle_keys()
    sources = manifest.get("sources")
    if not isinstance(sources, dict) or not sources:
        raise StorageError(f"{file}: its manifest lists no sources; make it again")
    changed = sorted(name for name, key in sources.items() if _source_key(name) != key)
    if changed:
        raise InputError(
            f"{file} is of quantkit {manifest.get('quantkit')}, since which {len(changed)} of {len(sources)} kernels "
            f"have changed ({changed[0].partition(':')[2][:60]} ...); make it again"
        )


def _source_key(name: str) -> str | None:
    """Of a kernel of this installation; None where there is none of this name."""
    parts = _KERNEL.fullmatch(name)
    if parts is None:
        return None
    try:
        kernel = getattr(importlib.import_module(parts[1]), parts[2])
    except (ImportError, AttributeError):
        return None
    return getattr(kernel, "cache_key", None)
