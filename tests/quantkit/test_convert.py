"""Conversion: the same bytes there and back, or a refusal that says why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.convert import convert
from quantkit.errors import CannotHold, InputError

Quantized = Callable[..., Path]


@pytest.fixture
def quantized(quantized_tiny: Quantized) -> Quantized:
    """The tiny model as a recipe writes it; nobody may change the folder."""
    return quantized_tiny


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = Checkpoint(one), Checkpoint(other)
    assert first.tensors.keys() == second.tensors.keys()
    for name in first.tensors:
        a, b = first.tensor(name), second.tensor(name)
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    assert first.config["quantization_config"] == second.config["quantization_config"]


@pytest.mark.parametrize(
    ("recipe", "changes", "there", "back"),
    [
        ("rtn-w4g128", (), "compressed-tensors", "gptq"),
        pytest.param("rtn-w4g128", (), "awq", "gptq", marks=pytest.mark.long),
        pytest.param(
            "rtn-w4g128",
            ("format.bits=3", "format.group_size=64"),
            "compressed-tensors",
            "gptq",
            marks=pytest.mark.long,
        ),
        ("rtn-w8", (), "compressed-tensors", "gptq"),
        ("rtn-w4g128", ("format.group_size=-1", "format.bits=8"), "w8a8", "gptq"),
        pytest.param("rtn-w4g128", ("format.sym=false",), "compressed-tensors", "gptq", marks=pytest.mark.long),
        ("rtn-w4g128", ("format.sym=false",), "gptq-v2", "gptq"),
        pytest.param("rtn-w4g128", ("format.sym=false",), "awq", "gptq", marks=pytest.mark.long),
        ("rtn-w4g128-asym", (), "compressed-tensors", "awq"),
        pytest.param("rtn-w4g128-asym", (), "gptq-v2", "awq", marks=pytest.mark.long),
        ("rtn-w4g128-ct", (), "gptq", "compressed-tensors"),
    ],
)
def test_there_and_back(
    quantized: Quantized, tmp_path: Path, recipe: str, changes: tuple[str, ...], there: str, back: str
) -> None:
    source = quantized(recipe, *changes)
    convert(source, there, tmp_path / "there")
    convert(tmp_path / "there", back, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    for module in Checkpoint(source).formats:
        decoded = (Checkpoint(folder).quantized(module).dequantize() for folder in (source, tmp_path / "there"))
        assert torch.equal(*decoded), module


def test_symmetric_awq_has_zero_points_in_the_file(quantized: Quantized, tmp_path: Path) -> None:
    """The config says so, or vLLM takes a kernel for float16 only; folders that say `false` mean the same weights."""
    source = Checkpoint(quantized("rtn-w4g128"))
    convert(source.folder, "awq", tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    assert config["quantization_config"]["zero_point"] is True
    for said in (True, False):
        config["quantization_config"]["zero_point"] = said
        (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
        read = Checkpoint(tmp_path / "awq")
        assert all(fmt.only_float16_elsewhere is not said for fmt in read.formats.values())
        for module in list(read.formats)[:3]:
            assert (read.tensor(f"{module}.qzeros") == 0x88888888 - (1 << 32)).all()
            assert torch.equal(read.weight(module), source.weight(module))


def test_one_layer_with_zero_points_keeps_those_of_all(quantized: Quantized, tmp_path: Path) -> None:
    """Layers of one scheme stay layers of one scheme."""
    source = Path(shutil.copytree(quantized("rtn-w4g128-asym"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(".qzeros") and "layers.1.mlp.down_proj" not in name:
            tensors[name].fill_(0x88888888 - (1 << 32))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, "gptq-v2", tmp_path / "out")
    assert {fmt.describe() for fmt in Checkpoint(tmp_path / "out").formats.values()} == {"W4 g128 asym"}


def test_mixed_bits_keep_their_modules(quantized: Quantized, tiny_model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "summary: mixed\nmethod: rtn\nformat: {name: gptq, bits: 4, group_size: 64}\n"
        'overrides:\n  - {modules: "*.down_proj", bits: 8}\n  - {modules: "*.layers.0.self_attn.o_proj", keep: true}\n'
    )
    quantkit.quantize(tiny_model, str(recipe), tmp_path / "gptq")
    convert(tmp_path / "gptq", "compressed-tensors", tmp_path / "there")
    convert(tmp_path / "there", "gptq", tmp_path / "back")
    assert_same_tensors(tmp_path / "gptq", tmp_path / "back")
    bits = {module.split(".")[-1]: fmt.bits for module, fmt in Checkpoint(tmp_path / "there").formats.items()}
    assert bits["down_proj"] == 8
    assert bits["up_proj"] == 4


def test_nested_scales_unfold(quantized: Quantized, tmp_path: Path) -> None:
    convert(quantized("nf4"), "nf4-plain", tmp_path / "plain")
    source, plain = Checkpoint(quantized("nf4-plain")), Checkpoint(tmp_path / "plain")
    module = next(iter(plain.formats))
    assert plain.formats[module] == source.formats[module]
    nested = Checkpoint(quantized("nf4")).quantized(module).dequantize()
    assert torch.equal(plain.quantized(module).dequantize(), nested)


@pytest.mark.parametrize(
    ("recipe", "changes", "to", "reason"),
    [
        ("nf4", (), "gptq", "same kind of codes"),
        ("rtn-w4g128", (), "nf4-plain", "same kind of codes"),
        ("llm-int8", (), "compressed-tensors", "same kind of codes"),
        ("rtn-w3g128", (), "awq", "4"),
        ("rtn-w4g128", (), "w8a8", "8"),
        ("rtn-w4g128-ct", ("format.bits=5",), "gptq", "2, 3, 4, 8"),
    ],
)
def test_refusals(
    quantized: Quantized, tmp_path: Path, recipe: str, changes: tuple[str, ...], to: str, reason: str
) -> None:
    source = quantized(recipe, *changes)
    with pytest.raises(CannotHold, match=reason):
        convert(source, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zero_point_of_zero_is_refused_by_gptq_v1(tiny_model: Path, quantized: Quantized, tmp_path: Path) -> None:
    made = quantized("rtn-w4g128", "format.sym=false", "format.version=2")
    source = Path(shutil.copytree(made, tmp_path / "source"))
    checkpoint = Checkpoint(source)
    has_zero = any(int(checkpoint.quantized(module).zeros.min()) == 0 for module in checkpoint.formats)  # type: ignore[attr-defined]
    assert not has_zero  # random weights never give one, so plant it
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qzeros"][0, 0] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CannotHold, match=r"model\.layers\.0\.mlp\.up_proj cannot become gptq.*version 2"):
        convert(source, "gptq", tmp_path / "out")
    convert(source, "compressed-tensors", tmp_path / "ct")


def test_plain_models_and_unknown_targets(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not quantized"):
        convert(tiny_model, "gptq", tmp_path / "out")
    with pytest.raises(InputError, match="did you mean 'gptq'"):
        convert(tiny_model, "gptk", tmp_path / "out")
