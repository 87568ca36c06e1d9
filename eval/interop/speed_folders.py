"""Folders to compare speeds on: random weights of a known shape, as they are and quantized by plain rounding.

Random ones, because zeros draw less power and run faster than weights do; plain rounding, because speed does not depend
on how codes were found.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.errors import InputError, did_you_mean
from quantkit.eval.scale import make_model
from quantkit.pipeline import quantize

PLAIN = "bf16"
RECIPES = {"w4": "rtn-w4g128", "awq": "rtn-w4g128-asym", "fp8": "fp8"}  # layouts: GPTQ, AWQ, compressed-tensors
FORMATS = (PLAIN, *RECIPES)


def check_formats(names: Sequence[str]) -> None:
    for name in names:
        if name not in FORMATS:
            raise InputError(f"unknown format '{name}'; {did_you_mean(name, FORMATS)}")


def make_folders(
    shape: str,
    folder: Path,
    formats: Sequence[str],
    *,
    device: str,
    blocks: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Path]:
    """What is not there yet is made; the unquantized one always, since the others are made of it."""
    found = {name: folder / f"{shape}-{name}" for name in formats}
    plain = folder / f"{shape}-{PLAIN}"
    if not plain.exists():
        say(f"making {plain}")
        beside = plain.with_name(f"{plain.name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        make_model(shape, beside, blocks=blocks, device=device)
        name_every_token(beside)
        beside.rename(plain)
    for name, path in found.items():
        if not path.exists():
            say(f"making {path}")
            quantize(plain, RECIPES[name], path, device=device, quality_windows=0, restart=True)
    return found


def name_every_token(folder: Path) -> None:
    """Gives the tokenizer a name for every id that the model can produce: servers turn answers into text."""
    vocab = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    names = tokenizer["model"]["vocab"]
    known = {*names.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    names |= {f"word{number}": number for number in range(vocab) if number not in known}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
