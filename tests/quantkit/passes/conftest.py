"""Small models of every family, saved in float32 and with nothing in them that hides a mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from quantkit.arch import Family


@pytest.fixture
def save_model() -> Callable[..., Any]:
    """`save_model(family, folder, **changes)`: saves a model with grouped-query attention and returns it."""

    def save(family: Family, folder: Path, **changes: Any) -> Any:
        sizes = {"sliding_window": 8, "max_position_embeddings": 2048, "initializer_range": 0.15}
        return tiny_models.save_model(family.model_type, folder, **(sizes | changes))

    return save
