"""Kernels compiled ahead: keys that do not depend on who asks first, Triton finds what was compiled, archives carry it
and are refused where they do not fit. In a process of its own: in this one Triton interprets."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import QuantkitError
from quantkit.kernels.compiling import archive
from quantkit.kernels.compiling.archive import install_archive

ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch, triton
from triton.runtime.jit import JITFunction
from quantkit.errors import QuantkitError
from quantkit.kernels.card import KNOWN
from quantkit.kernels.compiling.archive import install_archive, write_archive
from quantkit.kernels.compiling.keys import _has_key, kernel_modules, settle_keys
from quantkit.kernels.compiling.pool import compile_all
from quantkit.kernels.compiling.recording import instead_of_launches, listing
from quantkit.kernels.embedding import embed
from quantkit.kernels.norm import rms_norm

folder, card = Path(sys.argv[1]), KNOWN["sm_90"]
cache = triton.knobs.cache

def kernels():
    return {id(one): one for module in kernel_modules() for one in vars(module).values() if _has_key(one)}.values()

def keys():
    return {one.__module__ + one.__qualname__: one.cache_key for one in kernels()}

def forget():
    for one in kernels():
        one.hash, one.used_global_vals = None, {}

def launch(device):
    x = torch.zeros(5, 512, dtype=torch.bfloat16, device=device)
    rms_norm(x, x[0], 1e-6)
    rms_norm(x[:, :500], x[0, :500], 1e-6)
    embed(torch.arange(5).to(device), x)
    embed(torch.arange(6).to(device)[1:], x)

def entries():
    return sorted(path.name for path in Path(cache.dir).glob("*/*.cubin"))

found = {}
settle_keys()
settled = keys()
forget()
for one in reversed(list(kernels())):  # as processes that launch in another order do
    one.cache_key
found["keys that depend on the order"] = sum(settled[name] != key for name, key in keys().items())
forget()
from quantkit.kernels.sampling import draw
draw._weigh.cache_key
forget_none = settle_keys()
forget()
settle_keys()
found["settled again"] = keys() == settled

cache.dir = str(folder / "first")
with listing(card) as listed:
    launch("meta")
    launch("meta")
compiled = compile_all(listed, 1)
found["listed"] = [one.name for one in listed]
found["errors"] = [one.error for one in compiled if one.error]
found["compiled"] = entries()

def look_up(self, *args, grid, warmup, **options):
    run(self, *args, grid=grid, warmup=True, **options)
run = JITFunction.run
with instead_of_launches(card, look_up):
    launch("cpu")
found["after Triton's own look"] = entries()

found["written"] = vars(write_archive(folder / "archive", listed, compiled))
cache.dir = str(folder / "second")
found["installed"] = vars(install_archive(folder / "archive", "sm_90"))
found["again"] = install_archive(folder / "archive", None).new
for one in listed:
    one.source.fn.device_caches.clear()
with instead_of_launches(card, look_up):
    launch("cpu")
found["in the second cache"] = entries()
try:
    install_archive(folder / "archive", "sm_80")
except QuantkitError as error:
    found["other card"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with an archive, and what the process that made it found."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(folder)], capture_output=True, text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_keys_do_not_depend_on_who_asks_first(made: tuple[Path, dict[str, Any]]) -> None:
    found = made[1]
    assert found["settled again"]
    assert found["keys that depend on the order"] > 0  # else Triton has mended it, and `settle_keys` can go


def test_triton_finds_what_was_compiled(made: tuple[Path, dict[str, Any]]) -> None:
    """On real tensors, for the same card: nothing is compiled once more. Each kernel is listed once."""
    found = made[1]
    assert found["errors"] == []
    assert found["listed"] == ["_norm_rows", "_norm_rows", "_gather", "_gather"]
    assert len(found["compiled"]) == 4
    assert found["after Triton's own look"] == found["compiled"]


def test_an_archive_carries_kernels_to_another_cache(made: tuple[Path, dict[str, Any]]) -> None:
    found = made[1]
    assert found["written"]["kernels"] == found["installed"]["kernels"] == found["installed"]["new"] == 4
    assert found["again"] == 0
    assert found["in the second cache"] == found["compiled"]
    assert "is for sm_90, but this GPU is sm_80" in found["other card"]


def change(name: str) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    def edit(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
        path = next(iter(files))
        if name == "damaged":
            files[path] += b"x"
        elif name == "missing":
            del files[path]
        elif name == "outside":
            files["kernels/../../evil.json"] = b"{}"
        elif name == "absolute":
            files["/tmp/evil.cubin"] = b"x"
        elif name == "format":
            manifest["format"] = "quantkit-kernels-0"
        elif name == "triton":
            manifest["triton"] = "3.1.0"
        elif name == "build":
            manifest["build"] = "0" * 64
        elif name == "sources":
            manifest["sources"] = dict.fromkeys(manifest["sources"], "0" * 64)
        elif name == "other modules":
            manifest["sources"] = {"os:system": "0" * 64}
        elif name == "no sources":
            manifest["sources"] = {}

    return edit


WRONG = {
    "damaged": "is damaged",
    "missing": "not those of its manifest",
    "outside": "no archive of kernels: it has a file",
    "absolute": "no archive of kernels: it has a file",
    "format": "make it again",
    "triton": "is of Triton 3.1.0, here is",
    "build": "another build of Triton",
    "sources": "kernels have changed",
    "other modules": "kernels have changed",
    "no sources": "lists no sources",
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_archives_are_refused(name: str, made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with tarfile.open(made[0] / "archive") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    manifest = json.loads(files.pop("manifest.json"))
    change(name)(manifest, files)
    file = tmp_path / "changed"
    with tarfile.open(file, "w:gz") as tar:
        for path, data in {"manifest.json": json.dumps(manifest).encode(), **files}.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    refused(file, WRONG[name], tmp_path)


def test_what_is_no_archive_is_refused(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (made[0] / "archive").read_bytes()
    cut, text, linked = (tmp_path / name for name in ("cut", "text", "linked"))
    cut.write_bytes(whole[: len(whole) // 2])
    text.write_text("kernels")
    with tarfile.open(linked, "w:gz") as tar:
        link = tarfile.TarInfo(f"kernels/{'0' * 64}/a.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    refused(cut, "cut short", tmp_path)
    refused(text, "no archive of kernels", tmp_path)
    refused(linked, "no plain file", tmp_path)
    refused(tmp_path / "absent", "no file at", tmp_path)
    monkeypatch.setattr(archive, "LARGEST_FILE", 100)
    refused(made[0] / "archive", "larger than any kernel", tmp_path)


def refused(file: Path, words: str, tmp_path: Path) -> None:
    """In one line, and before anything is written."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    try:
        with pytest.raises(QuantkitError, match=words) as caught:
            install_archive(file, "sm_90")
    finally:
        os.environ.pop("TRITON_CACHE_DIR") if before is None else os.environ.update(TRITON_CACHE_DIR=before)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*/*")) if (tmp_path / "cache").exists() else True
