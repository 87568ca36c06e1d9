"""Activations are the same wherever they are kept, and leave nothing behind."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from quantkit.passes.activations import Activations, Place, available_memory, choose_place
from quantkit.pipeline.journal import Journal

CPU = torch.device("cpu")
PLACES = get_args(Place)


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Batches of odd sizes; the last one is not contiguous."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(samples, 7, 5, generator=generator).to(dtype) for samples in (3, 3, 1)]
    return [*found, torch.randn(5, 7, 2, generator=generator).to(dtype).transpose(0, 2)]


def kept(place: Place, folder: Path, dtype: torch.dtype = torch.float32) -> Activations:
    found = Activations(CPU, place, folder)
    found.extend(batches(dtype))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_same_values(place: Place, dtype: torch.dtype, tmp_path: Path) -> None:
    found = kept(place, tmp_path, dtype)
    assert len(found) == 4
    for batch, expected in zip(found, batches(dtype), strict=True):
        assert batch.dtype == dtype
        assert torch.equal(batch, expected)
    assert torch.equal(found[2], batches(dtype)[2])
    assert len(list(tmp_path.iterdir())) == (4 if place == "disk" else 0)


@pytest.mark.parametrize("place", PLACES)
def test_batches_are_replaced_while_they_are_read(place: Place, tmp_path: Path) -> None:
    """As a pass does, block after block; a new batch may have another shape."""
    found = kept(place, tmp_path)
    for index, batch in enumerate(found):
        found[index] = batch + 1
    found[1] = torch.zeros(2, 2)
    expected = [batch + 1 for batch in batches()]
    expected[1] = torch.zeros(2, 2)
    assert all(torch.equal(batch, other) for batch, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_what_was_read_does_not_change_with_what_is_kept(place: Place, tmp_path: Path) -> None:
    found = kept(place, tmp_path)
    first = found[0]
    found[0] = first * 2
    assert torch.equal(first, batches()[0])
    assert torch.equal(found[0], batches()[0] * 2)


def test_files_go_with_the_journal(tmp_path: Path) -> None:
    """When a run is complete, and when one fails that has finished nothing."""
    with Journal(tmp_path / "out", {}) as journal:
        kept("disk", journal.folder)
        assert len(list(journal.folder.glob("activations-*.bin"))) == 4
        journal.discard()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "out", {}) as journal:
        len(kept("disk", journal.folder)) / 0
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", {}) as journal:
        kept("disk", journal.folder)
        journal.commit({"a": torch.ones(2)}, {}, state={"batch-00000": torch.ones(3)})
    with Journal(tmp_path / "out", {}) as journal:
        assert journal.finished == 1
        assert list(journal.folder.glob("activations-*.bin")) == []
        assert [state.shape for _, state in journal.state()] == [(3,)]


def test_small_ones_stay_in_memory_and_huge_ones_go_to_disk() -> None:
    assert choose_place(1 << 20, CPU) == "host"
    assert choose_place(available_memory() * 4, CPU) == "disk"
    assert available_memory() > 1 << 20
