"""Fuzz: whatever is wrong with a checkpoint's files, the answer is a clear error or a right reading, never a crash."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.inspection import inspect_checkpoint

pytestmark = pytest.mark.long
RECIPES = ("rtn-w4g128", "rtn-w4g128-asym", "rtn-w3g128", "nf4", "llm-int8", "fp8", "rtn-w8a8")
WRONG: tuple[Any, ...] = (None, -1, 0, 3, 1e9, "", "x", [], {}, True)


def flip_bytes(folder: Path, dice: random.Random) -> None:
    file = dice.choice([folder / "config.json", folder / "model.safetensors"])
    data = bytearray(file.read_bytes())
    for _ in range(dice.randint(1, 8)):
        data[dice.randrange(min(len(data), 4000))] = dice.randrange(256)
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


def change_tensors(folder: Path, dice: random.Random) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = dice.choice(list(tensors))
    kind = dice.randrange(4)
    if kind == 0:
        del tensors[name]
    elif kind == 1 and tensors[name].ndim:
        tensors[name] = tensors[name][: max(1, tensors[name].shape[0] // 2)].clone()
    elif kind == 2:
        tensors[name] = tensors[name].reshape(-1).clone()
    else:
        tensors[name + "x"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage", [flip_bytes, cut, change_config, change_group, change_tensors], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_damage_gives_clear_errors(
    recipe: str, damage: Callable[[Path, random.Random], None], tiny_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(tiny_model, recipe, tmp_path / "good")
    dice = random.Random(f"{recipe} {damage.__name__}")
    for _ in range(40):
        bad = Path(shutil.copytree(tmp_path / "good", tmp_path / "bad"))
        damage(bad, dice)
        for read in (inspect_checkpoint, decode_all):
            with suppress(QuantkitError):  # anything else is a crash, and fails here
                read(bad)
        shutil.rmtree(bad)


def decode_all(folder: Path) -> None:
    for _ in Checkpoint(folder).decoded():
        pass
