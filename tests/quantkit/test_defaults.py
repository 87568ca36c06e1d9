"""One default for one thing, whichever door a user comes in by."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from quantkit import defaults
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.cli.compare import command as compare_command
from quantkit.cli.demo import command as demo_command
from quantkit.cli.eval_ import command as eval_command
from quantkit.cli.quantize import command as quantize_command
from quantkit.convert import convert
from quantkit.eval.quality.windows import read_windows
from quantkit.pipeline import quantize
from quantkit.pipeline.job import prepare


def option(command: Any, name: str) -> object:
    return next(each.default for each in command.params if each.name == name)


def argument(function: Callable[..., Any], name: str) -> object:
    return inspect.signature(function).parameters[name].default


@pytest.mark.parametrize(
    ("value", "doors"),
    [
        (
            defaults.DEVICE,
            (
                *(
                    option(command, "device")
                    for command in (quantize_command, compare_command, eval_command, demo_command)
                ),
                *(argument(function, "device") for function in (quantize, prepare)),
            ),
        ),
        (
            defaults.SHARD_BYTES,
            (
                option(quantize_command, "shard_size") * 1_000_000,  # type: ignore[operator]
                *(argument(function, "shard_bytes") for function in (quantize, prepare, convert, CheckpointWriter)),
            ),
        ),
        (
            defaults.QUALITY_WINDOWS,
            (
                option(quantize_command, "quality_windows"),
                *(argument(function, "quality_windows") for function in (quantize, prepare)),
            ),
        ),
        (
            defaults.WINDOW,
            (option(compare_command, "window"), option(eval_command, "window"), argument(read_windows, "window")),
        ),
    ],
    ids=("device", "shard size", "quality windows", "window"),
)
def test_doors_agree(value: object, doors: tuple[object, ...]) -> None:
    assert set(doors) == {value}
