"""What a user may write where a model to plan is asked for. Only config.json is read, or fetched."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint import read_json
from quantkit.errors import StorageError
from quantkit.eval.shapes import SHAPES
from quantkit.sources import model_folder
from quantkit.wording import model_name

CONFIG = "config.json"


def find_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """(name, config) of a shape, a folder, `demo` or a hub name; a shape's name wins over a folder of that name."""
    if model in SHAPES:
        return model, SHAPES[model]
    if _is_hub_name(model):
        return model, read_json(_fetch(model), "a model needs one")
    try:
        folder = model_folder(model)
    except StorageError as error:
        near = difflib.get_close_matches(model, SHAPES, n=1, cutoff=0.5)
        hint = f"did you mean the shape '{near[0]}'? " if near else ""
        raise StorageError(f"{error}; {hint}Shapes that need no files: {', '.join(SHAPES)}") from error
    return model_name(folder), read_json(folder / CONFIG, "a model folder needs one")


def _is_hub_name(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(owner.strip(".") and slash and name) and "/" not in name and not Path(model).exists()


def _fetch(name: str) -> Path:
    """config.json alone: no weights travel."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, CONFIG))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StorageError(f"no folder '{name}' here, and the hub did not give its {CONFIG}: {reason}") from error
