"""What is tried in other engines: everything that quantkit writes, made by commands that exist."""

import shlex
from pathlib import Path

import click
import pytest

from quantkit.checkpoint import Checkpoint
from quantkit.cli import cli
from quantkit.convert import TARGETS
from quantkit.engines import layout_of
from quantkit.errors import InputError
from quantkit.eval.interop.checkpoints import AS_IT_IS, all_tried, chosen, make, with_sources
from quantkit.inspection import layers_of
from quantkit.recipe import list_recipes, load_recipe

TRIED = all_tried()


def test_every_recipe_and_every_target_of_convert_is_there() -> None:
    names = [tried.name for tried in TRIED]
    assert len(set(names)) == len(names)
    assert {recipe.name for recipe in list_recipes() if not recipe.writes_gguf} <= set(names)
    from_layouts_of_others = {"ct-mxfp4"}  # from gpt-oss's own, which no recipe writes
    assert {tried.to for tried in TRIED if tried.to} == set(TARGETS) - from_layouts_of_others


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.name)
def test_commands_are_those_of_the_command_line(tried: object) -> None:
    line = tried.command("demo", Path("folder"))  # type: ignore[attr-defined]
    if not line:
        return
    _, name, *arguments = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    given = command.make_context(line, arguments).params
    if name == "quantize":
        load_recipe(given["recipe"], given["changes"])


def test_sources_come_first() -> None:
    seen = {AS_IT_IS}
    for tried in TRIED:
        assert tried.source in seen or not tried.source
        seen.add(tried.name)
    chain = [tried.name for tried in with_sources(chosen(["gptq-w4g128-to-awq-to-gptq"]))]
    assert chain == ["gptq-w4g128", "gptq-w4g128-to-awq", "gptq-w4g128-to-awq-to-gptq"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'gptq-w4g128'"):
        chosen(["gptq-w4g127"])


def test_they_are_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        make("demo-draft", tmp_path, chosen(["rtn-w4g128-ct-to-gptq", "fp8-tensor"]), "cpu", said.append)
    assert [shlex.split(line)[1] for line in said] == ["quantize", "quantize", "convert"]
    layouts = {
        folder.name: layout_of(layers_of(Checkpoint(folder))) for folder in tmp_path.iterdir() if folder.is_dir()
    }
    assert layouts == {
        AS_IT_IS: "unquantized",
        "rtn-w4g128-ct": "compressed-tensors W4 g128 sym",
        "rtn-w4g128-ct-to-gptq": "gptq W4 g128 sym",
        "fp8-tensor": "compressed-tensors FP8 tensor, dynamic",
    }
