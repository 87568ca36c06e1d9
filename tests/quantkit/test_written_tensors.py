"""Every tensor of a checkpoint is read back and compared before the folder gets its name, whatever made it."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit import checkpoint_writer
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.checksums import checksum
from quantkit.convert import convert
from quantkit.errors import QuantkitError
from quantkit.formats import Format
from quantkit.pipeline import run
from quantkit.pipeline.job import Job
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.report import QuantizeReport
from quantkit.pipeline.writing import write_checkpoint
from quantkit.recipe import load_recipe
from quantkit.sources import model_folder

Damage = Callable[[str, dict[str, Tensor]], None]
FaultyDisk = Callable[[Damage, str], None]


def flip(name: str, tensors: dict[str, Tensor]) -> None:
    """One bit of the last value."""
    if name in tensors:
        tensors[name].view(-1).view(torch.uint8)[-1] ^= 1


def drop(name: str, tensors: dict[str, Tensor]) -> None:
    tensors.pop(name, None)


def double(name: str, tensors: dict[str, Tensor]) -> None:
    tensors[name] = tensors[name].double()


def turn(name: str, tensors: dict[str, Tensor]) -> None:
    tensors[name] = tensors[name].view(tensors[name].shape[::-1])


def add(name: str, tensors: dict[str, Tensor]) -> None:
    tensors[name + "x"] = torch.ones(3)


@pytest.fixture
def faulty_disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """`faulty_disk(damage, name)`: of what a checkpoint's writer gives to the disk, this tensor arrives damaged."""

    def replace(damage: Damage, name: str) -> None:
        def save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
            arrived = {name: tensor.clone() for name, tensor in tensors.items()}
            damage(name, arrived)
            save_file(arrived, file, metadata)

        monkeypatch.setattr(checkpoint_writer, "save_file", save)

    return replace


def write(output: Path) -> None:
    with CheckpointWriter(output) as writer:
        writer.add("a", torch.arange(6.0).view(2, 3))
        writer.add("b", torch.tensor(7))  # no dimension
        writer.add("c", torch.zeros(3, 0, dtype=torch.bfloat16))  # no value
        writer.add_json("config.json", {"model_type": "llama"})
        writer.finish()


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (flip, "a", "a read back from disk differs from what was written"),
        (flip, "b", "b read back from disk differs from what was written"),
        (double, "a", "a read back from disk differs"),
        (double, "c", "c read back from disk differs"),
        (turn, "a", "a read back from disk differs"),
        (drop, "a", "a is missing in what was written"),
        (add, "a", "ax stands in what was written, but nobody wrote it"),
    ],
)
def test_damage_on_the_way_to_the_disk(
    damage: Damage, name: str, words: str, faulty_disk: FaultyDisk, tmp_path: Path
) -> None:
    faulty_disk(damage, name)
    with pytest.raises(QuantkitError, match=f"^{words}"):
        write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "part", ["embed_tokens.weight", "norm.weight", "layers.0.mlp.up_proj.bias", "layers.1.mlp.up_proj.g_idx"]
)
def test_quantize_compares_every_tensor(
    part: str, family_model: Callable[[str], Path], faulty_disk: FaultyDisk, tmp_path: Path
) -> None:
    """What is kept as it is, and what decoding does not read."""
    faulty_disk(flip, f"model.{part}")
    recipe = load_recipe("rtn-w4g128", ["format.group_size=32"])
    with pytest.raises(QuantkitError, match=rf"^model\.{part} read back from disk differs"):
        quantkit.quantize(family_model("llama"), recipe, tmp_path / "out", quality_windows=0)
    assert not (tmp_path / "out").exists()


def test_convert_compares_every_tensor(
    quantized_tiny: Callable[..., Path], faulty_disk: FaultyDisk, tmp_path: Path
) -> None:
    faulty_disk(flip, "model.norm.weight")
    with pytest.raises(QuantkitError, match=r"^model\.norm\.weight read back from disk differs"):
        convert(quantized_tiny("rtn-w4g128"), "awq", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folded_norm_is_what_was_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From before the journal had it. The same command then does the block again."""
    norm = "model.layers.1.input_layernorm.weight"
    recipe = load_recipe("awq-w4g128", ["method={name: awq, points: 1, clip: false}"])
    quantize = partial(quantkit.quantize, "demo-draft", recipe, calibration=Calibration(samples=1, seq_len=16))

    def damaged(job: Job, chosen: Mapping[str, Format], journal: Journal, **more: Any) -> QuantizeReport:
        file = journal.folder / "unit-00001.safetensors"
        tensors = load_file(file)
        flip(norm, tensors)
        save_file(tensors, file)
        return write_checkpoint(job, chosen, journal, **more)

    with monkeypatch.context() as patched:
        patched.setattr(run, "write_checkpoint", damaged)
        with pytest.raises(QuantkitError, match=rf"^{re.escape(norm)} read back from disk differs"):
            quantize(tmp_path / "out", quality_windows=0)
    quantize(tmp_path / "out", quality_windows=0)
    assert not torch.equal(*(Checkpoint(model_folder(each)).tensor(norm) for each in ("demo-draft", tmp_path / "out")))


def test_checksums_see_swaps_and_kinds() -> None:
    """Pieces are shared by threads: their order counts."""
    large = torch.arange(5 << 20, dtype=torch.int32)  # three pieces
    swapped = torch.cat([large[2 << 20 : 4 << 20], large[: 2 << 20], large[4 << 20 :]])
    same = [large, large.clone(), large.view(-1, 2).T.contiguous().T.flatten()]
    others = [swapped, large.view(-1, 2), large.view(torch.float32), large[:-1]]
    assert len({checksum(tensor) for tensor in same}) == 1
    assert len({checksum(tensor) for tensor in (large, *others)}) == 5
