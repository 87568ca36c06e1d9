"""Parts of a quantized layer that are not what its format reads: refused, where they would decode to garbage."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint import INDEX, Checkpoint
from quantkit.errors import InputError, StorageError
from raw_safetensors import read_raw, write_raw

MODULE = "model.layers.0.mlp.up_proj"  # [384, 256]
CT_ASYM = ("rtn-w4g128-ct", "format.sym=false")
GPTQ_V2 = ("rtn-w4g128", "format.version=2")
Copy = Callable[..., Path]


@pytest.fixture
def copy(quantized_tiny: Callable[..., Path], tmp_path: Path) -> Copy:
    """`copy(recipe, *changes)`: the tiny model by a recipe, in a folder to be damaged."""
    return lambda *recipe: Path(shutil.copytree(quantized_tiny(*recipe), tmp_path / "model"))


def change_header(folder: Path, part: str, **entry: Any) -> None:
    header, payload = read_raw(folder / "model.safetensors")
    header[f"{MODULE}.{part}"] |= entry
    write_raw(folder / "model.safetensors", header, payload)


def change_parts(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replaces parts of the layer, or removes them."""
    tensors = load_file(folder / "model.safetensors")
    for part, tensor in changes.items():
        del tensors[f"{MODULE}.{part}"]
        if tensor is not None:
            tensors[f"{MODULE}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("recipe", "part", "dtype"),
    [
        (("rtn-w4g128",), "g_idx", "F32"),
        (("rtn-w4g128",), "qzeros", "F32"),
        (("nf4",), "weight.absmax", "BOOL"),
        (("nf4",), "weight.nested_absmax", "I32"),
        (("nf4",), "weight.nested_quant_map", "U32"),
        (("nf4-plain",), "weight.absmax", "I32"),
        (("llm-int8",), "SCB", "I32"),
        (("llm-int8",), "weight", "U8"),
        (("rtn-w8a8",), "weight", "U8"),
        (("rtn-w8a8",), "weight", "F8_E4M3"),
        (("fp8",), "weight", "I8"),
        (("fp8",), "weight", "F8_E5M2"),
        (("rtn-w4g128-ct",), "weight_shape", "F64"),
    ],
)
def test_another_dtype_of_the_same_width(copy: Copy, recipe: tuple[str, ...], part: str, dtype: str) -> None:
    folder = copy(*recipe)
    change_header(folder, part, dtype=dtype)
    with pytest.raises(InputError, match=rf"{MODULE}\b.*(is needed|not a valid|codes)"):
        Checkpoint(folder).weight(MODULE)


@pytest.mark.parametrize(
    ("recipe", "part", "shape"),
    [
        (("rtn-w4g128-asym",), "qzeros", [1, 96]),
        (GPTQ_V2, "qzeros", [1, 96]),
        (("rtn-w4g128",), "scales", [1, 768]),
        (CT_ASYM, "weight_zero_point", [96, 1]),
        (("fp8",), "weight_scale", [192, 2]),
    ],
)
def test_another_shape_of_as_many_values(copy: Copy, recipe: tuple[str, ...], part: str, shape: list[int]) -> None:
    folder = copy(*recipe)
    change_header(folder, part, shape=shape)
    with pytest.raises(StorageError, match=rf"{MODULE} in .*{part} is \w+ {re.escape(str(shape))}, but .* is needed"):
        Checkpoint(folder).weight(MODULE)


@pytest.mark.parametrize(
    ("recipe", "part", "shape"),
    [
        (("nf4-plain",), "weight.absmax", [1536, 1]),
        (("nf4",), "weight.nested_absmax", [1, 6]),
        (("llm-int8",), "SCB", [384, 1]),
        (("fp8",), "weight_scale", [384]),
        (("rtn-w8a8",), "weight_scale", [1, 384]),
    ],
)
def test_dimensions_of_size_one_do_not_matter(copy: Copy, recipe: tuple[str, ...], part: str, shape: list[int]) -> None:
    folder = copy(*recipe)
    right = Checkpoint(folder).weight(MODULE)
    change_header(folder, part, shape=shape)
    assert torch.equal(Checkpoint(folder).weight(MODULE), right)


def test_wider_integers_and_other_storage_read_the_same(copy: Copy) -> None:
    for recipe, part, dtype in (("rtn-w4g128", "g_idx", torch.int64), ("nf4", "weight", torch.bfloat16)):
        folder = copy(recipe)
        right, stored = Checkpoint(folder).weight(MODULE), Checkpoint(folder).tensor(f"{MODULE}.{part}")
        wider = stored.to(dtype) if part == "g_idx" else stored.view(-1, 2).view(dtype)
        change_parts(folder, {part: wider})
        assert torch.equal(Checkpoint(folder).weight(MODULE), right)
        shutil.rmtree(folder)


def test_missing_zero_points_and_groups(copy: Copy) -> None:
    """Both had a default: the middle, and groups in order."""
    folder = copy(*CT_ASYM)
    change_parts(folder, {"weight_zero_point": None})
    with pytest.raises(StorageError, match=f"{MODULE} in .* part 'weight_zero_point' is missing"):
        Checkpoint(folder).weight(MODULE)
    shutil.rmtree(folder)
    folder = copy("rtn-w4g128")
    change_parts(folder, {"g_idx": None})
    Checkpoint(folder).weight(MODULE)  # without act-order groups are in order
    change_config(folder, desc_act=True)
    with pytest.raises(StorageError, match=f"{MODULE} in .* part 'g_idx' is missing"):
        Checkpoint(folder).weight(MODULE)
    shutil.rmtree(folder)
    folder = copy("rtn-w4g128-ct")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"weight_g_idx is missing"):
        Checkpoint(folder).weight(MODULE)


@pytest.mark.parametrize(
    ("recipe", "part"),
    [
        ("llm-int8", "SCB"),
        ("fp8", "weight_scale"),
        ("rtn-w8a8", "weight_scale"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ],
)
def test_codes_are_no_weights(copy: Copy, recipe: str, part: str) -> None:
    """Without the scales, or without a word about them."""
    folder = copy(recipe)
    kept = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**kept, "quantization_config": None}))
    with pytest.raises(StorageError, match=r"tensor model\.layers\.0\.\S+\.weight in .* codes without"):
        dict(Checkpoint(folder).decoded())
    (folder / "config.json").write_text(json.dumps(kept))
    change_parts(folder, {part: None})
    with pytest.raises(StorageError, match=f"tensor {MODULE}.weight in .* codes without"):
        dict(Checkpoint(folder).decoded())


def test_llm_int8_in_the_order_of_a_gpu(copy: Copy) -> None:
    folder = copy("llm-int8")
    change_parts(folder, {"weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(StorageError, match="weight_format is 2"):
        Checkpoint(folder).weight(MODULE)


def test_blocks_of_another_size(copy: Copy) -> None:
    """Half of the scales look like blocks of 128; the quant_state says 64."""
    folder = copy("nf4-plain")
    change_parts(folder, {"weight.absmax": torch.ones(768)})
    with pytest.raises(StorageError, match="1536 blocks"):
        Checkpoint(folder).weight(MODULE)


@pytest.mark.parametrize(("recipe", "other"), [(("rtn-w4g128",), "gptq_v2"), (GPTQ_V2, "gptq"), (GPTQ_V2, None)])
def test_symmetric_gptq_that_names_the_other_version(copy: Copy, recipe: tuple[str, ...], other: str | None) -> None:
    folder = copy(*recipe)
    change_config(folder, checkpoint_format=other)
    with pytest.raises(StorageError, match="names the other version"):
        Checkpoint(folder).weight(MODULE)
    change_config(folder, checkpoint_format="marlin")
    with pytest.raises(InputError, match=r"checkpoint_format of .* is 'marlin', but must be one of gptq, gptq_v2"):
        Checkpoint(folder).weight(MODULE)


def test_padded_words_of_older_compressed_tensors(copy: Copy) -> None:
    """Versions up to 0.16 put ten 3-bit codes in a word; `formats/test_formats.py` has the layout."""
    folder = copy("rtn-w4g128-ct", "format.bits=3", "format.sym=false")
    checkpoint = Checkpoint(folder)
    right, shape = checkpoint.weight(MODULE), checkpoint.layer_shape(MODULE)
    weight = checkpoint.quantized(MODULE)
    padded = {"weight_packed": pad_words(weight.codes), "weight_zero_point": pad_words(weight.zeros.T).T.contiguous()}  # type: ignore[attr-defined]
    assert padded["weight_packed"].shape == (shape[0], 26)
    change_parts(folder, dict(padded))
    assert torch.equal(Checkpoint(folder).weight(MODULE), right)
    part = Checkpoint(folder).quantized_part(MODULE, slice(64, 128), slice(0, 128)).dequantize()
    assert torch.equal(part, right[64:128, :128])


def pad_words(codes: Tensor) -> Tensor:
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // 10), dtype=torch.int32)
    for place in range(codes.shape[1]):
        words[:, place // 10] |= codes[:, place].int() << (3 * (place % 10))
    return words


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    """The index says which one counts; without an index nobody knows."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "new.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "old.safetensors")
    with pytest.raises(StorageError, match=r"new\.safetensors and .*old\.safetensors both hold tensor a"):
        Checkpoint(tmp_path)
    for first, total in (("new", 2), ("old", 0)):
        write_index(tmp_path, a=first, b="old")
        assert Checkpoint(tmp_path).tensor("a").sum() == total
    write_index(tmp_path, a="new", b="new")
    with pytest.raises(StorageError, match="names 1 tensors that their files do not hold, the first is b"):
        Checkpoint(tmp_path)


def write_index(folder: Path, **files: str) -> None:
    weight_map = {name: f"{file}.safetensors" for name, file in files.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
