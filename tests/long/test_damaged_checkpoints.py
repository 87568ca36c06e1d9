"""Fuzz: whatever is wrong with a checkpoint's files, the answer is a clear error or the right weights.

What stands only once in the files cannot be missed there. A flipped bit among the weights themselves gives another
weight, and must not crash, that is all (`flip_payload`). A dtype that says F16 where BF16 was, or the other way round,
and GPTQ with zero points that names the other version, describe other checkpoints that are as right as this one: no
damage here makes one of the other.
"""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.checkpoint import INDEX, Checkpoint
from quantkit.errors import QuantkitError
from quantkit.inspection import inspect_checkpoint
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.loading import load_weights
from raw_safetensors import header_length, read_raw, write_raw

pytestmark = pytest.mark.long
Damage = Callable[[Path, random.Random], None]
RECIPES: dict[str, tuple[str, ...]] = {
    "rtn-w4g128": (),
    "rtn-w4g128-asym": (),
    "rtn-w3g128": (),
    "rtn-w4g128-ct": ("format.sym=false",),
    "nf4": (),
    "nf4-plain": (),
    "llm-int8": (),
    "fp8": (),
    "rtn-w8a8": (),
}
ROUNDS = 20
SHARDS = 300_000  # bytes each: four or more files
WRONG: tuple[Any, ...] = (None, -1, 0, 3, 1e9, "", "x", [], {}, True, False)
SAME_WIDTH: tuple[tuple[str, ...], ...] = (
    *(("F16", "I16", "U16"), ("BF16", "I16", "U16"), ("F32", "I32", "U32"), ("I64", "F64", "U64")),
    ("I8", "U8", "F8_E4M3", "F8_E5M2", "BOOL"),
)


def flip_header(folder: Path, dice: random.Random) -> None:
    _flip(folder / "model.safetensors", dice, lambda data: range(8 + header_length(data)))


def flip_config(folder: Path, dice: random.Random) -> None:
    _flip(folder / "config.json", dice, lambda data: range(len(data)))


def flip_payload(folder: Path, dice: random.Random) -> None:
    _flip(folder / "model.safetensors", dice, lambda data: range(8 + header_length(data), len(data)))


def _flip(file: Path, dice: random.Random, places: Callable[[bytes], range]) -> None:
    data = bytearray(file.read_bytes())
    where = places(bytes(data))
    for _ in range(dice.randint(1, 8)):
        data[dice.choice(where)] = dice.randrange(256)
    file.write_bytes(bytes(data))


def cut(folder: Path, dice: random.Random) -> None:
    file = dice.choice([folder / "config.json", folder / "model.safetensors"])
    data = file.read_bytes()
    file.write_bytes(data[: dice.randrange(len(data))])


def change_config(folder: Path, dice: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = dice.choice([config, config["quantization_config"]])
    target[dice.choice(list(target))] = dice.choice(WRONG)
    (folder / "config.json").write_text(json.dumps(config))


def change_group(folder: Path, dice: random.Random) -> None:
    """One value deep inside the quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    level: Any = config["quantization_config"]
    while inner := [value for value in level.values() if isinstance(value, dict) and value]:
        level = dice.choice(inner)
    level[dice.choice(list(level))] = dice.choice(WRONG)
    (folder / "config.json").write_text(json.dumps(config))


def forget_config(folder: Path, dice: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = dice.choice([config, config["quantization_config"]])
    del target["quantization_config" if target is config else dice.choice(list(target))]
    (folder / "config.json").write_text(json.dumps(config))


def any_part(names: Iterable[str], dice: random.Random) -> str:
    """A tensor of any kind: most are of the same few."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault(re.sub(r".*_proj", "", name), []).append(name)
    return dice.choice(dice.choice(list(kinds.values())))


def change_tensors(folder: Path, dice: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = any_part(tensors, dice)
    kind = dice.randrange(4)
    if kind == 0:
        del tensors[name]
    elif kind == 1 and tensors[name].ndim:
        dim = dice.randrange(tensors[name].ndim)
        tensors[name] = tensors[name].narrow(dim, 0, max(1, tensors[name].shape[dim] // 2)).clone()
    elif kind == 2:
        tensors[name] = tensors[name].reshape(-1).clone()
    else:
        tensors[name + "x"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_dtype(folder: Path, dice: random.Random) -> None:
    """To another one of the same width, which the file's own checks let pass."""
    header, payload = read_raw(folder / "model.safetensors")
    entry = header[any_part(header, dice)]
    entry["dtype"] = dice.choice(
        [other for kinds in SAME_WIDTH if entry["dtype"] in kinds for other in kinds if other != entry["dtype"]]
    )
    write_raw(folder / "model.safetensors", header, payload)


def change_shape(folder: Path, dice: random.Random) -> None:
    """To another one of as many values."""
    header, payload = read_raw(folder / "model.safetensors")
    entry = header[any_part(header, dice)]
    shape = entry["shape"]
    shapes = [shape[::-1], [math.prod(shape)], [*shape, 1], [1, *shape]]
    shapes += [[shape[0] // 2, shape[1] * 2], [shape[0] * 2, shape[1] // 2]] if len(shape) == 2 else []
    entry["shape"] = dice.choice(shapes)
    write_raw(folder / "model.safetensors", header, payload)


def exchange_offsets(folder: Path, dice: random.Random) -> None:
    """Of two tensors that differ in size; of the same size they would be as right."""
    header, payload = read_raw(folder / "model.safetensors")
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
    one = any_part(header, dice)
    other = dice.choice([name for name in header if sizes[name] != sizes[one]])
    places = header[one]["data_offsets"], header[other]["data_offsets"]
    header[other]["data_offsets"], header[one]["data_offsets"] = places
    write_raw(folder / "model.safetensors", header, payload)


def change_index(folder: Path, dice: random.Random) -> None:
    index = json.loads((folder / INDEX).read_text())
    places = index["weight_map"]
    name = dice.choice(list(places))
    kind = dice.randrange(4)
    if kind == 0:
        del places[name]
    elif kind == 1:
        places[name + "x"] = places.pop(name)
    elif kind == 2:
        places[name] = dice.choice(sorted(set(places.values())))
    else:
        places[name] = dice.choice(WRONG)
    (folder / INDEX).write_text(json.dumps(index))


def hold_twice(folder: Path, dice: random.Random) -> None:
    """An old file among the new ones has a tensor of another one; the index says whose it is."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = dice.choice(list(index))
    file = folder / dice.choice([other for other in set(index.values()) if other != index[name]])
    tensors = load_file(file)
    save_file(tensors | {name: torch.zeros_like(load_file(folder / index[name])[name])}, file, {"format": "pt"})


def lose_file(folder: Path, dice: random.Random) -> None:
    dice.choice(sorted(folder.glob("*.safetensors"))).unlink()
    if dice.random() < 0.5:
        (folder / INDEX).unlink()  # then nothing says that there was another one


ONE_FILE: tuple[Damage, ...] = (
    *(flip_header, flip_config, cut, change_config, change_group, forget_config),
    *(change_tensors, change_dtype, change_shape, exchange_offsets),
)
MANY_FILES: tuple[Damage, ...] = (change_index, hold_twice, lose_file)


@pytest.mark.parametrize("damage", ONE_FILE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_refused_or_right(recipe: str, damage: Damage, quantized_tiny: Callable[..., Path], tmp_path: Path) -> None:
    good = quantized_tiny(recipe, *RECIPES[recipe])
    right = decoded(good)
    for bad in damaged(good, damage, tmp_path, recipe):
        assert_refused_or_right(bad, right)


@pytest.mark.parametrize("damage", MANY_FILES, ids=lambda damage: damage.__name__)
def test_several_files_refused_or_right(damage: Damage, tiny_model: Path, tmp_path: Path) -> None:
    quantkit.quantize(tiny_model, "llm-int8", tmp_path / "good", quality_windows=0, shard_bytes=SHARDS)
    right = decoded(tmp_path / "good")
    for bad in damaged(tmp_path / "good", damage, tmp_path, "llm-int8"):
        assert_refused_or_right(bad, right)


@pytest.mark.parametrize("recipe", RECIPES)
def test_damaged_payload_does_not_crash(recipe: str, quantized_tiny: Callable[..., Path], tmp_path: Path) -> None:
    for bad in damaged(quantized_tiny(recipe, *RECIPES[recipe]), flip_payload, tmp_path, recipe):
        for read in (inspect_checkpoint, decoded):
            with suppress(QuantkitError):  # anything else is a crash, and fails here
                read(bad)


def damaged(good: Path, damage: Damage, tmp_path: Path, seed: str) -> Iterator[Path]:
    """The same folder, damaged in one way after the other."""
    dice = random.Random(f"{seed} {damage.__name__}")
    for _ in range(ROUNDS):
        bad = Path(shutil.copytree(good, tmp_path / "bad"))
        damage(bad, dice)
        yield bad
        shutil.rmtree(bad)


def assert_refused_or_right(folder: Path, right: dict[str, Tensor]) -> None:
    """All weights are there and the same to the bit; else who loads the model refuses it."""
    with suppress(QuantkitError):
        inspect_checkpoint(folder)
    try:
        found = decoded(folder)
    except QuantkitError:
        return
    wrong = [name for name, tensor in right.items() if name not in found or not same(found[name], tensor)]
    for load in (quantkit.load_reference, load_in_engine) if wrong else ():
        try:
            load(folder)
        except QuantkitError:
            continue
        pytest.fail(f"{load.__name__} takes {wrong} for right")


def decoded(folder: Path) -> dict[str, Tensor]:
    return dict(Checkpoint(folder).decoded())


def same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def load_in_engine(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    load_weights(checkpoint, read_model_config(checkpoint.config), torch.float32, torch.device("cpu"))
