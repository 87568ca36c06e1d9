"""What tests share keeps its word: covers have every pair, and nothing in a tiny model hides a mistake."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from pairwise import cover
from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from tiny_models import SETTINGS, build_model, save_model


@pytest.mark.parametrize("sizes", [(2, 2), (7, 2, 2), (8, 2, 3, 2, 2), (1, 5, 1), (3, 3, 3, 3), (6, 4, 2)], ids=str)
def test_every_pair_is_in_a_cover(sizes: tuple[int, ...]) -> None:
    options = [[f"{option}-{number}" for number in range(size)] for option, size in enumerate(sizes)]
    rows = cover(*options)
    seen = {pair for row in rows for pair in combinations(row, 2)}
    assert seen == {pair for one, other in combinations(options, 2) for pair in product(one, other)}
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(rows) <= largest * second + 3
    assert cover(*options) == rows


@pytest.mark.parametrize("options", [(), ([1, 2],), ([1], [])])
def test_nothing_to_pair(options: tuple[list[int], ...]) -> None:
    with pytest.raises(ValueError, match="two options or more"):
        cover(*options)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_every_family(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path, **SETTINGS[family])
    for name, parameter in model.named_parameters():
        assert float(parameter.detach().std()) > 0.05, name
    assert Checkpoint(tmp_path).config["num_hidden_layers"] == 2
    again: Any = build_model(family, "bfloat16", **SETTINGS[family])
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)
    assert len(build_model(family, num_hidden_layers=3).get_submodule(FAMILIES[family].blocks)) == 3
