"""A part of a stored layer decodes to exactly that part of the whole layer, in every format and on odd shapes."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import (
    FORMATS,
    Awq,
    BlockMxfp4,
    CodebookWeight,
    CtFloat8,
    CtInt8,
    CtMxfp4,
    CtNvfp4,
    CtPacked,
    Format,
    Fp4,
    Gptq,
    Index,
    IntegerWeight,
    LlmInt8,
    Nf4,
    Parts,
    QuantizedWeight,
    Shape,
    dialect_of,
)
from quantkit.formats.codebook import NestedScales

NAME = "model.layers.0.mlp.down_proj"
Problem = tuple[Format, Shape, Index, Index]


@st.composite
def problems(draw: st.DrawFn, kind: str) -> Problem:
    """A format with random options, a shape that it allows, some outputs and some inputs."""
    out, odd, sym = draw(st.integers(2, 70)), draw(st.integers(3, 131)), draw(st.booleans())
    group = draw(st.sampled_from([-1, 16, 32, 64]))
    shape = (out, 64 * draw(st.integers(1, 4)))
    fmt: Format
    if kind == "gptq":
        bits, version = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([1, 2]))
        fmt = Gptq(bits=bits, group_size=group, sym=sym, version=version, act_order=draw(st.booleans()))
    elif kind == "awq":
        fmt, shape = Awq(group_size=group, sym=sym), (8 * out, shape[1])
    elif kind == "ct-packed":
        fmt = CtPacked(bits=draw(st.integers(2, 8)), group_size=group, sym=sym)
        shape = (out, odd if group == -1 else shape[1])
    elif kind in ("nf4", "fp4"):
        block, double = draw(st.sampled_from([32, 64, 256])), draw(st.booleans())
        fmt = Nf4(block=block, double_quant=double) if kind == "nf4" else Fp4(block=block, double_quant=double)
        shape = (8 * out, shape[1]) if draw(st.booleans()) else (out, odd)
    elif kind in ("ct-mxfp4", "mxfp4", "ct-nvfp4"):
        fmt = next(each for each in (CtMxfp4(), BlockMxfp4(), CtNvfp4()) if each.name == kind)
    elif kind == "ct-float8":
        fmt = CtFloat8(strategy=draw(st.sampled_from(["tensor", "channel", "block"])))
        shape = (5 * out, 3 * odd)
    else:
        fmt, shape = (LlmInt8() if kind == "llm-int8" else CtInt8()), (out, odd)
    blocks = 128 if fmt.output_unit > 1 else 1
    return fmt, shape, draw(indices(shape[0], blocks)), draw(indices(shape[1], blocks))


def indices(size: int, unit: int) -> st.SearchStrategy[Index]:
    """Slices, and lists of any order; slices of whole units where nothing else can be taken."""
    firsts = st.integers(0, (size - 1) // unit).map(lambda first: first * unit)
    slices: st.SearchStrategy[Index] = firsts.flatmap(
        lambda first: st.integers(first + 1, size).map(lambda stop: slice(first, stop))
    )
    lists = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True).map(torch.tensor)
    return st.just(slice(0, size)) | slices if unit > 1 else st.just(slice(0, size)) | slices | lists


def quantized(fmt: Format, shape: Shape, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    weight = fmt.quantize(torch.randn(shape, generator=generator) * 0.05)
    if isinstance(fmt, Gptq) and fmt.act_order:
        return scattered(weight, generator)
    return weight


def scattered(weight: QuantizedWeight, generator: torch.Generator) -> IntegerWeight:
    assert isinstance(weight, IntegerWeight)
    order = torch.randperm(weight.shape[1], generator=generator)
    return replace(weight, group_of=weight.input_groups()[order].int())


def saved(fmt: Format, parts: Parts, folder: Path) -> Checkpoint:
    written = {"quant_method": "mxfp4"} if fmt.name == "mxfp4" else dialect_of({NAME: fmt}).write({NAME: fmt}, [])
    config = {"model_type": "llama", "quantization_config": written}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"{NAME}.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def assert_parts_are_exact(checkpoint: Checkpoint, outputs: Index, inputs: Index) -> QuantizedWeight:
    part = checkpoint.quantized_part(NAME, outputs, inputs)
    expected = checkpoint.weight(NAME)[outputs][:, inputs]
    assert part.shape == expected.shape
    assert torch.equal(part.dequantize(), expected)
    return part


@pytest.mark.parametrize("kind", FORMATS)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_every_format(kind: str, data: st.DataObject, seed: int) -> None:
    fmt, shape, outputs, inputs = data.draw(problems(kind))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = saved(fmt, fmt.pack(quantized(fmt, shape, seed)), Path(folder))
        assert_parts_are_exact(checkpoint, outputs, inputs)


def test_whole_groups_in_act_order_need_no_order(tmp_path: Path) -> None:
    """Inputs sorted by group, half of the groups: what a rank takes of a down projection."""
    fmt = Gptq(group_size=32, sym=False, act_order=True)
    checkpoint = saved(fmt, fmt.pack(quantized(fmt, (40, 256))), tmp_path)
    groups = checkpoint.scattered_groups(NAME)
    assert groups is not None
    part = assert_parts_are_exact(checkpoint, slice(0, 40), torch.argsort(groups, stable=True)[128:])
    assert isinstance(part, IntegerWeight)
    assert part.group_of is None
    assert part.scales.shape == (40, 4)


def test_groups_in_order_are_not_scattered(tmp_path: Path) -> None:
    """`desc_act` in the config, and groups in order all the same: they are cut like any others."""
    fmt = Gptq(group_size=32, act_order=True)
    checkpoint = saved(fmt, fmt.pack(replace(fmt, act_order=False).quantize(torch.randn(40, 256))), tmp_path)
    assert checkpoint.scattered_groups(NAME) is None
    assert_parts_are_exact(checkpoint, slice(8, 40), slice(64, 192))


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_with_unused_bits(bits: int) -> None:
    """compressed-tensors up to 0.16."""
    fmt, shape = CtPacked(bits=bits, group_size=64, sym=False), (192, 320)
    weight = fmt.quantize(torch.randn(shape))
    parts = fmt.pack(weight) | {
        "weight_packed": loosely_packed(weight.codes, bits),
        "weight_zero_point": loosely_packed(weight.zeros.mT, bits).mT,
    }
    assert torch.equal(fmt.decode(parts), weight.dequantize())
    around = fmt.narrow(parts, shape, slice(96, 192), slice(64, 192))
    outputs, inputs = around.outputs.start, around.inputs.start
    part = fmt.unpack(around.parts).cut(slice(96 - outputs, 192 - outputs), slice(64 - inputs, 192 - inputs))
    assert torch.equal(part.dequantize(), weight.dequantize()[96:, 64:192])


def loosely_packed(codes: Tensor, bits: int) -> Tensor:
    """int32 words of 32 // bits codes each, the top bits empty."""
    per_word = 32 // bits
    fields = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word)).int()
    words = torch.zeros(fields.shape[:2], dtype=torch.int32)
    for place in range(per_word):
        words |= fields[..., place] << (bits * place)
    return words


def test_compressed_tensors_with_scattered_groups(tmp_path: Path) -> None:
    fmt = CtPacked(group_size=32, sym=False)
    weight = scattered(fmt.quantize(torch.randn(40, 256)), torch.Generator().manual_seed(0))
    parts = fmt.pack(replace(weight, group_of=None))
    assert weight.group_of is not None
    checkpoint = saved(fmt, parts | {"weight_g_idx": weight.group_of}, tmp_path)
    assert torch.equal(checkpoint.weight(NAME), weight.dequantize())
    assert_parts_are_exact(checkpoint, slice(3, 29), slice(32, 160))
    part = assert_parts_are_exact(checkpoint, slice(3, 29), torch.argsort(weight.group_of, stable=True)[:128])
    assert isinstance(part, IntegerWeight)
    assert part.group_of is None


@pytest.mark.parametrize("outputs", [slice(0, 96), slice(96, 192), torch.tensor([5, 0, 191])])
def test_nested_scales_stay_nested(outputs: Index, tmp_path: Path) -> None:
    """Decoded ones would take four times the memory."""
    fmt = Nf4(block=64)
    checkpoint = saved(fmt, fmt.encode(torch.randn(192, 512)), tmp_path)
    for inputs in (slice(0, 512), slice(256, 512)):
        part = assert_parts_are_exact(checkpoint, outputs, inputs)
        assert isinstance(part, CodebookWeight)
        assert isinstance(part.absmax, NestedScales)
        assert part.block == 64


def test_static_inputs_keep_their_scale(tmp_path: Path) -> None:
    fmt = CtFloat8(strategy="tensor", activations="static")
    weight = fmt.with_input_scale(fmt.quantize(torch.randn(48, 80)), 3.0)
    checkpoint = saved(fmt, fmt.pack(weight), tmp_path)
    part = assert_parts_are_exact(checkpoint, slice(24, 48), slice(40, 80))
    x = torch.randn(5, 80)
    assert torch.equal(fmt.served_inputs(x[:, 40:], part), fmt.served_inputs(x, weight)[:, 40:])


def test_a_part_inside_one_block(tmp_path: Path) -> None:
    fmt = CtFloat8(strategy="block")
    checkpoint = saved(fmt, fmt.encode(torch.randn(300, 260)), tmp_path)
    assert_parts_are_exact(checkpoint, slice(130, 256), slice(128, 260))


def test_parts_across_blocks_are_refused(tmp_path: Path) -> None:
    fmt = CtFloat8(strategy="block")
    checkpoint = saved(fmt, fmt.encode(torch.randn(300, 260)), tmp_path)
    with pytest.raises(InputError, match="must begin where a block begins"):
        checkpoint.quantized_part(NAME, slice(64, 192), slice(0, 260))
