"""`convert --to gguf` of quantized folders: the same weights to the bit, or a refusal with the reason."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from quantkit import quantize
from quantkit.checkpoint import Checkpoint
from quantkit.convert import convert
from quantkit.errors import CannotHold
from quantkit.formats import CtPacked, IntegerWeight
from quantkit.gguf_export.codes import as_blocks, block_kind
from quantkit.gguf_import.folder import write_view
from quantkit.recipe import load_recipe
from tiny_models import save_model
from tiny_tokenizers import VOCAB_SIZE, save_byte_level

GROUPS_OF_32 = "format={name: %s, bits: %d, group_size: 32, sym: %s}"


def quantized(tmp_path: Path, *changes: str, dtype: str = "float16") -> Path:
    save_model("llama", tmp_path / "model", dtype, vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=96)
    save_byte_level(tmp_path / "model")
    recipe = load_recipe("rtn-w4g32", changes)
    quantize(tmp_path / "model", recipe, tmp_path / "quantized", quality_windows=0, device="cpu")
    return tmp_path / "quantized"


@pytest.mark.parametrize(
    ("name", "bits", "dtype", "kind"),
    [
        ("gptq", 4, "float16", "Q4_0"),
        ("ct-packed", 4, "bfloat16", "Q4_0"),
        ("gptq", 8, "float16", "Q8_0"),
    ],
)
def test_codes_become_blocks_without_loss(name: str, bits: int, dtype: str, kind: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path, GROUPS_OF_32 % (name, bits, "true"), dtype=dtype)
    report = convert(folder, "gguf", tmp_path / "model.gguf")
    assert f"14 x {kind}" in report.target_format
    assert report.exact
    (tmp_path / "view").mkdir()
    write_view(tmp_path / "model.gguf", tmp_path / "view")
    before, after = Checkpoint(folder), Checkpoint(tmp_path / "view")
    for module in before.formats:
        assert torch.equal(after.weight(module), before.weight(module)), module
    convert(tmp_path / "view", "gguf", tmp_path / "again.gguf")  # blocks stay as they are
    one, other = (GGUFReader(tmp_path / name).tensors for name in ("model.gguf", "again.gguf"))
    for tensor, same in zip(one, other, strict=True):
        assert (tensor.name, tensor.tensor_type) == (same.name, same.tensor_type)
        assert bool((tensor.data == same.data).all())


def test_zero_points_have_no_place(tmp_path: Path) -> None:
    folder = quantized(tmp_path, GROUPS_OF_32 % ("ct-packed", 4, "false"))
    with pytest.raises(CannotHold, match=r"cannot become Q4_0: it has zero points"):
        convert(folder, "gguf", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def weight(group: int = 32) -> IntegerWeight:
    return CtPacked(bits=4, group_size=group, dtype="float16").quantize(torch.randn(8, 128))


def test_wider_groups_repeat_their_scale() -> None:
    for group in (64, 128):
        packed = as_blocks("layer", weight(group), "Q4_0")
        assert packed.shape == (8, 4 * 18)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (replace(weight(), scales=weight().scales.float() * 1.0001), "its scales are no float16 numbers"),
        (replace(weight(), group_of=torch.zeros(128, dtype=torch.int32)), "act-order scatters its groups"),
        (weight(16), "no multiple of 32 inputs"),
    ],
)
def test_what_blocks_cannot_hold(changed: IntegerWeight, says: str) -> None:
    with pytest.raises(CannotHold, match=says):
        as_blocks("layer", changed, "Q4_0")
    with pytest.raises(CannotHold, match="whose codes no GGUF type holds"):
        block_kind("layer", CtPacked(bits=3, group_size=32))
