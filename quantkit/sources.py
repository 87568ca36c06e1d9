"""What a user may write where a model is asked for: a folder, a GGUF file, a hub name, or the bundled `demo`."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.errors import StorageError
from quantkit.extras import require

BUNDLED = ("demo", "demo-draft", "demo-experts")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md"]


def model_folder(model: str | Path) -> Path:
    """The local folder of a model. Hub models are downloaded once, without pickle files. A GGUF file has a folder in
    the user's cache, which says where its weights are."""
    if str(model) in BUNDLED:
        return bundled_folder(str(model))
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        require(str(model), "gguf")
        from quantkit.gguf_import.folder import gguf_folder

        return gguf_folder(path)
    if path.is_file():
        raise StorageError(f"'{model}' is a file, but a model is a folder; give the folder that holds it")
    if path.is_absolute() or str(model).startswith(".") or not _HUB_NAME.fullmatch(str(model)):
        raise StorageError(
            f"no model at '{model}'; give a folder with config.json, a .gguf file, a hub name such as org/model, "
            "or 'demo'"
        )
    return _download(str(model))


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StorageError(
            f"no folder '{name}' here, and the hub did not give a model of that name: {reason}"
        ) from error


def bundled_folder(name: str) -> Path:
    return Path(__file__).parent / "bundled" / name
