"""The journal: what was finished is found again exactly, what is damaged is done again."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.pipeline.journal import Journal

ARGUMENTS: dict[str, Any] = {
    "model": "demo",
    "recipe": {"method": "gptq", "format": {"name": "gptq", "bits": 4}},
    "seed": 0,
    "files": [["model.safetensors", 31_000_000]],
}


def unit(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {f"b.{index}": torch.randn(8, 4, generator=generator), f"a.{index}": torch.arange(6, dtype=torch.int32)}


def interrupted(output: Path, count: int = 3, arguments: dict[str, Any] = ARGUMENTS) -> Path:
    """The journal of a run that ended after `count` units; returns its folder."""
    with Journal(output, arguments) as journal:
        for index in range(count):
            journal.commit(unit(index), {"loss": index / 3})
    return journal.folder


def assert_holds(journal: Journal, count: int) -> None:
    assert journal.finished == count
    for index in range(count):
        found = list(journal.tensors(index))
        assert [name for name, _ in found] == list(unit(index))
        assert all(torch.equal(tensor, unit(index)[name]) for name, tensor in found)
        assert journal.record(index) == {"loss": index / 3}


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out", 2)
    assert folder == tmp_path / ".out.journal"
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 2)
        journal.commit(unit(2), {"loss": 2 / 3})
        assert_holds(journal, 3)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 3)
        journal.discard()
    assert list(tmp_path.iterdir()) == []


def test_order_of_keys_and_tuples_are_the_same_arguments(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", 1)
    same = ARGUMENTS | {"files": (("model.safetensors", 31_000_000),)}
    with Journal(tmp_path / "out", dict(reversed(same.items()))) as journal:
        assert_holds(journal, 1)


def test_nothing_but_finished_units_can_be_asked_for(tmp_path: Path) -> None:
    interrupted(tmp_path / "out", 1)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        for index in (1, -1):
            with pytest.raises(IndexError):
                journal.record(index)
            with pytest.raises(IndexError):
                list(journal.tensors(index))


DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
DTYPES += ("int8", "uint8", "int16", "int32", "int64", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_to_the_bit(tmp_path: Path, dtype: str) -> None:
    """Every bit pattern, NaN and Inf among them, and views that are not contiguous."""
    kind = getattr(torch, dtype)
    plain = torch.arange(16 * 64, dtype=torch.int32).to(torch.uint8).view(16, 64)
    plain = (plain % 2).bool() if dtype == "bool" else plain.view(kind)
    given = {"plain": plain, "turned": plain.T, "one": plain[0, 0], "none": plain[:0], "some": plain[1:7:2]}
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        journal.commit(given, {})
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        for name, tensor in journal.tensors(0):
            assert tensor.dtype == kind
            assert tensor.shape == given[name].shape
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), given[name].reshape(-1).view(torch.uint8))


def test_parameters_and_units_without_tensors(tmp_path: Path) -> None:
    weight = torch.nn.Linear(3, 2).weight
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        journal.commit({"weight": weight}, {})
        journal.commit({}, {"nothing": None})
        assert torch.equal(dict(journal.tensors(0))["weight"], weight)
        assert list(journal.tensors(1)) == []
        assert journal.record(1) == {"nothing": None}


@pytest.mark.gpu
def test_tensors_of_a_gpu(tmp_path: Path) -> None:
    weight = torch.randn(4, 4, device="cuda")
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        journal.commit({"weight": weight}, {})
        ((_, back),) = journal.tensors(0)
    assert torch.equal(back, weight.cpu())


def test_records_come_back_exactly(tmp_path: Path) -> None:
    floats = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1.0, math.pi]
    record = {"floats": floats, "big": 2**70, "text": "ä\n\u2028\U0001f600", "deep": {"a": [None, True, {}]}}
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        journal.commit({}, record | {"keys": {10: 1, 9: 2}})
        fresh = journal.record(0)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert journal.finished == 1, "keys that JSON turns into text are no damage"
        assert journal.record(0) == fresh == record | {"keys": {"10": 1, "9": 2}}
        assert [value.hex() for value in journal.record(0)["floats"]] == [value.hex() for value in floats]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(bytes(data))


def flip_in_the_middle(file: Path) -> None:
    flip(file, file.stat().st_size // 2)


def flip_at_the_end(file: Path) -> None:
    flip(file, -5)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def not_an_object(file: Path) -> None:
    file.write_bytes(b"[1, 2]")


def nested_too_deep(file: Path) -> None:
    file.write_bytes(b"[" * 200_000)


def another_record(file: Path) -> None:
    """Still valid JSON, but not what was committed."""
    text = file.read_text()
    assert "0.3333333333333333" in text
    file.write_text(text.replace("0.3333333333333333", "0.3333333333333334"))


DAMAGES = (Path.unlink, cut, empty, flip_in_the_middle, flip_at_the_end, grow, not_an_object, nested_too_deep)


@pytest.mark.parametrize("name", ["unit-00001.safetensors", "unit-00001.json"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_dropped_with_all_behind_it(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    folder = interrupted(tmp_path / "out", 4)
    damage(folder / name)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 1)
        assert sorted(file.name for file in folder.glob("unit-*")) == ["unit-00000.json", "unit-00000.safetensors"]
        journal.commit(unit(1), {"loss": 1 / 3})
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 2)


def test_a_changed_record_and_exchanged_units_are_damage(tmp_path: Path) -> None:
    another_record(interrupted(tmp_path / "changed", 2) / "unit-00001.json")
    with Journal(tmp_path / "changed", ARGUMENTS) as journal:
        assert_holds(journal, 1)
    folder = interrupted(tmp_path / "exchanged", 3)
    (folder / "unit-00002.safetensors").replace(folder / "unit-00001.safetensors")
    with Journal(tmp_path / "exchanged", ARGUMENTS) as journal:
        assert_holds(journal, 1)


def test_half_written_files_are_cleared_away(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out", 1)
    (folder / "unit-00001.safetensors").write_bytes(b"no json yet")
    (folder / "unit-00002.safetensors.partial").write_bytes(b"half")
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 1)
        assert len(list(folder.glob("unit-*"))) == 2


def test_units_of_other_arguments_are_never_taken(tmp_path: Path) -> None:
    """Left over in the folder, whole in themselves, but made with another seed."""
    stray = interrupted(tmp_path / "stray", 2, ARGUMENTS | {"seed": 1})
    folder = interrupted(tmp_path / "out", 1)
    for file in stray.glob("unit-00001.*"):
        file.replace(folder / file.name)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 1)


@pytest.mark.parametrize("damage", [Path.unlink, empty, cut, not_an_object], ids=lambda damage: damage.__name__)
def test_damaged_arguments(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The units themselves know which arguments they belong to."""
    folder = interrupted(tmp_path / "out", 2)
    damage(folder / "arguments.json")
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 2)
    with pytest.raises(InputError, match="seed was 0, now 1"):
        Journal(tmp_path / "out", ARGUMENTS | {"seed": 1})


def fail_with(journal: Journal, error: BaseException, units: int) -> None:
    with journal:
        for index in range(units):
            journal.commit(unit(index), {"loss": index / 3})
        raise error


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=repr)
def test_a_failed_run_leaves_a_journal_only_with_units(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        fail_with(Journal(tmp_path / "out", ARGUMENTS), error, 0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(type(error)):
        fail_with(Journal(tmp_path / "out", ARGUMENTS), error, 2)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 2)


def test_an_error_after_the_end_leaves_the_next_run_alone(tmp_path: Path) -> None:
    first = Journal(tmp_path / "out", ARGUMENTS)
    first.discard()
    with Journal(tmp_path / "out", ARGUMENTS) as second:
        with pytest.raises(ZeroDivisionError):
            fail_with(first, ZeroDivisionError(), 0)
        second.commit(unit(0), {"loss": 0.0})
        assert_holds(second, 1)


def with_states(output: Path, count: int) -> Path:
    """The journal of a run whose units hand something on."""
    with Journal(output, ARGUMENTS) as journal:
        for index in range(count):
            journal.commit(unit(index), {"loss": index / 3}, {"b": torch.ones(5), "a": torch.full((3,), index)})
    return journal.folder


def test_the_last_state_is_found_again(tmp_path: Path) -> None:
    folder = with_states(tmp_path / "out", 4)
    assert sorted(file.name for file in folder.glob("state-*")) == [f"state-0000{i}.safetensors" for i in (2, 3)]
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 4)
        (_, first), (_, second) = journal.state()
        assert torch.equal(first, torch.full((3,), 3))
        assert torch.equal(second, torch.ones(5))
        journal.commit(unit(4), {"loss": 4 / 3})
        journal.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["state-00003.safetensors", "unit-00003.safetensors", "unit-00003.json"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip_at_the_end], ids=lambda damage: damage.__name__)
def test_a_damaged_end_costs_one_unit(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    folder = with_states(tmp_path / "out", 4)
    damage(folder / name)
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 3)
        assert torch.equal(next(journal.state())[1], torch.full((3,), 2))
        assert not (folder / "state-00003.safetensors").exists()


def test_nothing_goes_on_without_its_state(tmp_path: Path) -> None:
    folder = with_states(tmp_path / "out", 4)
    for file in folder.glob("state-*"):
        file.unlink()
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert journal.finished == 0


def test_notes_are_made_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert journal.note("plan", lambda: {"bits": (4, 3)}) == {"bits": [4, 3]}
        journal.commit(unit(0), {"loss": 0.0})
    with Journal(tmp_path / "out", ARGUMENTS) as journal:
        assert_holds(journal, 1)
        assert journal.note("plan", dict) == {"bits": [4, 3]}
    with Journal(tmp_path / "out", ARGUMENTS, restart=True) as journal:
        assert journal.note("plan", lambda: {"bits": [2]}) == {"bits": [2]}
