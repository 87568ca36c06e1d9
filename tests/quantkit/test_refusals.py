"""What `quantize` refuses, `quantize --dry-run` refuses with the same words; neither leaves anything behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.pipeline.earlier_run import journal_folder
from quantkit.pipeline.journal import Journal
from quantkit.sources import model_folder
from quantkit.storage import FolderLock

Cli = Callable[..., tuple[int, str, str]]
Options = tuple[object, ...]
Case = Callable[["Room"], Options]
MIXED = "method: rtn\nformat: {{name: {}}}\noverrides:"
UP = "model.layers.1.mlp.up_proj.weight"


class Room:
    """A folder with a model that a case may break, a short text, and the output that no case may leave."""

    def __init__(self, top: Path) -> None:
        self.top, self.model, self.output = top, top / "model", top / "out"
        self.recipe: object = "rtn-w4g128"
        self.text = top / "notes.txt"
        self.text.write_text("word " * 600)

    def command(self, options: Options) -> Options:
        fixed = ("quantize", self.model, "-r", self.recipe, "-o", self.output, "--device", "cpu")
        return (*fixed, "--text", self.text, "--samples", 2, "--seq-len", 64, "--quality-windows", 0, *options)

    def set_config(self, **changes: object) -> None:
        file = self.model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def change(self, name: str, value: float | None) -> None:
        """One number of a tensor; None takes the tensor away."""
        tensors = load_file(self.model / "model.safetensors")
        if value is None:
            del tensors[name]
        else:
            tensors[name].view(-1)[3] = value
        save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})

    def write_recipe(self, text: str) -> None:
        self.recipe = self.top / "mine.yaml"
        self.recipe.write_text(f"summary: x\n{text}\n")


@pytest.fixture
def room(tiny_model: Path, tmp_path: Path) -> Room:
    shutil.copytree(tiny_model, tmp_path / "model")
    for file in model_folder("demo-draft").glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    return Room(tmp_path)


def given(recipe: str, *options: object) -> Case:
    """A recipe's name, and more options."""

    def change(room: Room) -> Options:
        room.recipe = recipe
        return options

    return change


def written(text: str) -> Case:
    """A recipe of one's own."""

    def change(room: Room) -> Options:
        room.write_recipe(text)
        return ()

    return change


def no_model(room: Room) -> Options:
    room.model = room.top / "nowhere"
    return ()


def no_config(room: Room) -> Options:
    (room.model / "config.json").unlink()
    return ()


def broken_config(room: Room) -> Options:
    (room.model / "config.json").write_text('{"model_type": ')
    return ()


def unknown_family(room: Room) -> Options:
    room.set_config(model_type="llamma")
    return ()


def truncated_weights(room: Room) -> Options:
    file = room.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:9000])
    return ()


def quantized_already(room: Room) -> Options:
    scales = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 8, dtype=torch.int32)}
    scales["model.layers.0.mlp.up_proj.scales"] = torch.zeros(1, 8, dtype=torch.float16)
    save_file(scales, room.model / "more.safetensors")
    room.set_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True})
    (room.model / "model.safetensors").unlink()
    (room.model / "more.safetensors").rename(room.model / "model.safetensors")
    return ()


def missing_tensor(room: Room) -> Options:
    room.change(UP, None)
    return ()


def missing_tensor_of_a_kept_layer(room: Room) -> Options:
    room.change(UP, None)
    room.write_recipe("method: rtn\nformat: {name: gptq}\nkeep: ['model.layers.1.mlp.*']")
    return ()


def nan_outside_the_blocks(room: Room) -> Options:
    room.change("model.norm.weight", float("nan"))
    return ()


def output_exists(room: Room) -> Options:
    room.output.mkdir()
    return ()


def output_is_a_file(room: Room) -> Options:
    room.output.write_text("")
    return ("--overwrite",)


def output_is_no_checkpoint(room: Room) -> Options:
    room.output.mkdir()
    (room.output / "thesis.txt").write_text("precious")
    return ("--overwrite",)


def output_below_a_file(room: Room) -> Options:
    room.output = room.text / "deep" / "out"
    return ()


def no_tokenizer(room: Room) -> Options:
    room.recipe = "gptq-w4g128"
    for file in room.model.glob("*token*"):
        file.unlink()
    return ()


def no_text(room: Room) -> Options:
    room.recipe, room.text = "gptq-w4g128", room.top / "none.txt"
    return ()


def short_text(room: Room) -> Options:
    room.recipe = "fp8-static"
    room.text.write_text("Much too short.")
    return ()


def broken_collection(room: Room) -> Options:
    room.recipe, room.text = "awq-w4g128", room.top / "chats.jsonl"
    room.text.write_text('{"text": 3}\n')
    return ()


CASES: dict[str, tuple[Case, str]] = {
    "no model": (no_model, "no model at"),
    "no config.json": (no_config, "config.json is missing"),
    "broken config.json": (broken_config, "JSON"),
    "unknown family": (unknown_family, "did you mean 'llama'"),
    "truncated weights": (truncated_weights, "truncated or corrupted"),
    "quantized already": (quantized_already, "quantized already"),
    "unknown recipe": (given("rtn-w4g218"), "did you mean 'rtn-w4g128'"),
    "unknown key": (written("method: rtn\nformat: {name: gptq, groupsize: 64}"), "group_size"),
    "pattern without layers": (
        written("method: rtn\nformat: {name: gptq}\nkeep: ['*.experts.*']"),
        "matches no linear layer",
    ),
    "nothing to quantize": (written("method: rtn\nformat: {name: gptq}\nkeep: ['*']"), "nothing would be quantized"),
    "fused layers apart": (
        written(f"{MIXED.format('ct-packed')} [{{modules: '*.q_proj', bits: 8}}]"),
        "must share one scheme",
    ),
    "schemes that do not mix": (
        written(f"{MIXED.format('awq')} [{{modules: '*.down_proj', group_size: 64}}]"),
        "one group size",
    ),
    "format that does not suit": (given("gptq-w4g128", "--set", "format={name: nf4}"), "integer grid"),
    "scattered groups": (given("gptq-w4g128", "--set", "method.order=desc_act"), "act_order"),
    "group size": (given("rtn-w4g128", "--set", "format.group_size=96"), "96 does not divide"),
    "target out of reach": (given("auto-w3.5", "--target-bits", 2), "choose a number in between"),
    "missing tensor": (missing_tensor, "incomplete"),
    "missing tensor of a kept layer": (missing_tensor_of_a_kept_layer, "incomplete"),
    "NaN outside the blocks": (nan_outside_the_blocks, "NaN or Inf"),
    "device": (given("rtn-w4g128", "--device", "tpu"), "'tpu'"),
    "shard size": (given("rtn-w4g128", "--shard-size", 0), "at least 1 MB"),
    "output exists": (output_exists, "--overwrite"),
    "output is a file": (output_is_a_file, "not a folder"),
    "output is no checkpoint": (output_is_no_checkpoint, "not a checkpoint"),
    "output below a file": (output_below_a_file, "cannot write in"),
    "no tokenizer": (no_tokenizer, "no tokenizer files"),
    "no text": (no_text, "none.txt"),
    "short text": (short_text, "less than one window"),
    "broken collection": (broken_collection, "'text' is 3"),
    "sequences too long": (given("gptq-w4g128", "--seq-len", 257), "2 to 256"),
    "no samples": (given("gptq-w4g128", "--samples", 0), "0 samples"),
    "negative seed": (given("gptq-w4g128", "--seed", -1), "seed -1"),
    "quality windows": (given("rtn-w4g128", "--quality-windows", -1), "0 (none) or more"),
}


def both_doors(run_cli: Cli, room: Room, options: Options) -> str:
    """What both say, having left everything as it was."""
    said = []
    for door in ((), ("--dry-run",)):
        before = sorted(room.top.rglob("*"))
        code, out, err = run_cli(*room.command(options), *door)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert sorted(room.top.rglob("*")) == before
        said.append(err)
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("case", CASES)
def test_both_doors_refuse_with_the_same_words(case: str, run_cli: Cli, room: Room) -> None:
    change, words = CASES[case]
    assert words in both_doors(run_cli, room, change(room))


def test_no_space(run_cli: Cli, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    assert "only 1 MB are free" in both_doors(run_cli, room, ())


def test_another_run(run_cli: Cli, room: Room) -> None:
    with Journal(room.output, {"recipe": "another"}) as journal:
        journal.commit({"a": torch.zeros(2)}, {})
    assert "1 finished block of another run" in both_doors(run_cli, room, ())
    assert run_cli(*room.command(("--restart", "--dry-run")))[0] == 0
    assert "1 finished block of another run" in both_doors(run_cli, room, ())  # which a dry run did not throw away


def test_another_process(run_cli: Cli, room: Room) -> None:
    lock = FolderLock(journal_folder(room.output), "busy")
    try:
        assert f"another process is writing {room.output}: process {os.getpid()}" in both_doors(run_cli, room, ())
    finally:
        lock.release()


def test_a_dry_run_leaves_nothing_behind(run_cli: Cli, room: Room) -> None:
    room.output = room.top / "deep" / "deeper" / "out"
    before = sorted(room.top.rglob("*"))
    code, out, _ = run_cli(*room.command(("--dry-run", "--json")))
    assert code == 0
    assert json.loads(out)["output"]["format"] == "gptq"
    assert sorted(room.top.rglob("*")) == before


def test_a_dry_run_tells_of_data_that_only_the_log_needs(run_cli: Cli, room: Room) -> None:
    room.recipe = "llm-int8"
    _, out, _ = run_cli(*room.command(("--dry-run",)))
    assert "2 sequences of 64 tokens" in out
