"""Reads one downloaded package archive into documents: {"source", "name", "blocks"}."""

from __future__ import annotations

import gzip
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from . import extract

Member = tuple[str, bytes]

READABLE = re.compile(
    r"\.(html?|xhtml|txt|rst|md|py|json|json\.gz|txt\.gz|rst\.gz|md\.gz|rdb|[bc]zz|[bc]zs)$|/data\.(noun|verb|adj|adv)$"
    r"|/(README|INSTALL|TUTORIAL|HOWTO)[^/.]*$",
    re.IGNORECASE,
)
SKIP = re.compile(
    r"genindex|py-modindex|/search|changelog|changes\.|/copyright|licen[cs]e|_modules/|_sources/|-members\.|_source\.html"
    r"|/(annotated|hierarchy|classes|files|functions|globals|namespaces|inherits|modules)[^/]*\.html|class-use|package-(tree|use|frame)"
    r"|index-all|allclasses|overview-|/src/.*\.rs\.html|deprecated-list|constant-values|serialized-form|help-doc|/tests?/|_test\.|/test_"
    r"|/locale/|/help/|/(ja|de|fr|es|it|zh[_a-z-]*|ru|pt[_a-z-]*|ko|pl|tr|cs|uk|id|nl|hu|fa|vi|sv|el)/|[._-](ja|de|fr|es|it|zh|ru|pt|ko|pl|zh_cn)\."
    r"|node_modules|_static/|/static/|SOURCES\.txt|requirements[^/]*\.txt|top_level|entry_points|CMakeLists|/vendor|third_party|NOTICE",
    re.IGNORECASE,
)
LIMIT_FILE = 4_000_000
LIMIT_PACKAGE = 150_000_000
SERVICE_JSON = re.compile(r"(service-\d+\.json(\.gz)?|discovery_cache/documents/[^/]*\.json)$")


def debian_members(path: Path) -> Iterator[Member]:
    """Readable files of a binary Debian package, streamed without unpacking to disk."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield from tar_members(process.stdout)


def tar_members(stream: IO[bytes], mode: str = "r|") -> Iterator[Member]:
    """Regular files of a tar stream that may hold text, plus Debian's copyright file."""
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for member in archive:
            wanted = member.name.endswith("/copyright") or (
                READABLE.search(member.name) and not SKIP.search(member.name)
            )
            binary = member.name.endswith((".rdb", "zz", ".json", ".gz")) or "/data." in member.name
            if member.isfile() and wanted and member.size < (60_000_000 if binary else LIMIT_FILE):
                handle = archive.extractfile(member)
                if handle is not None:
                    yield member.name, handle.read()


def zip_members(path: Path) -> Iterator[Member]:
    """Files of a wheel or zip archive that may hold text."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if READABLE.search(info.filename) and not SKIP.search(info.filename) and info.file_size < LIMIT_FILE:
                yield info.filename, archive.read(info)


def members(path: Path) -> Iterator[Member]:
    """Text-bearing files of any supported archive."""
    if path.suffix == ".deb":
        yield from debian_members(path)
    elif path.suffix in {".whl", ".zip", ".egg"}:
        yield from zip_members(path)
    else:
        with path.open("rb") as stream:
            yield from tar_members(stream, "r|*")


def blocks_of(name: str, data: bytes) -> list[extract.Block]:
    """Blocks of one file, by its name."""
    if SERVICE_JSON.search(name):
        return extract.api_json(data, name)
    if name.startswith("package/data/") and name.endswith(".json"):
        return extract.text_json(data)
    if name.endswith(".rdb"):
        return extract.r_strings(data)
    if name.endswith(".gz"):
        name, data = name[:-3], gzip.decompress(data)
    text = data.decode("utf-8", "replace")
    lower = name.lower()
    if "/data." in name and "wordnet" in name:
        return extract.wordnet(text)
    if lower.endswith((".html", ".htm", ".xhtml")):
        return extract.html(text)
    if lower.endswith(".rst") or (lower.endswith(".txt") and re.search(r"^\.\. |\n[=~-]{4,}\n|::\n", text)):
        return extract.rst(text)
    if lower.endswith(".md"):
        return extract.markdown(text)
    if lower.endswith(".py"):
        return extract.docstrings(text)
    return [] if lower.endswith((".json", "zz", "zs")) else extract.plain(text)


def documents(path: Path, source: str) -> Iterator[dict[str, object]]:
    """Documents of one archive, up to a limit of raw bytes."""
    total = 0
    index: dict[str, bytes] = {}
    for name, data in members(path):
        total += len(data)
        if total > LIMIT_PACKAGE:
            return
        blocks: list[extract.Block] = []
        if name.endswith(("zs", "zz")):
            index[name[-2:]] = data
            if len(index) == 2:
                blocks, index = extract.sword(index["zs"], index["zz"]), {}
        else:
            try:
                blocks = blocks_of(name, data)
            except (ValueError, OSError, EOFError, RecursionError):
                continue
        if blocks:
            yield {"source": source, "name": name.lstrip("./"), "blocks": blocks}
