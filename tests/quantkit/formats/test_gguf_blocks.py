"""Blocks of GGUF files: every bit is where llama.cpp has it, and nothing is lost on the way there and back."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.gguf import TYPES, Blocks, BlockType, Gguf, GgufWeight, pack, unpack

ROWS, BLOCKS = 6, 4
kinds = pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)


def random_rows(kind: BlockType) -> Tensor:
    """Bytes of some rows, their 16-bit numbers any that are finite, of both signs, subnormal and large."""
    generator = torch.Generator().manual_seed(kind.nbytes)
    rows = torch.randint(0, 256, (ROWS, BLOCKS, kind.nbytes), generator=generator, dtype=torch.uint8)
    for start in (kind.scale_at, kind.minimum_at):
        if start is not None:
            rows[..., start + 1] &= 0xBF  # exponents up to 15 of 31
    return rows.flatten(1)


def weight_of(kind: BlockType) -> GgufWeight:
    return Gguf(kind.name).unpack({"weight": random_rows(kind)})


def decoded_elsewhere(rows: Tensor, kind: BlockType) -> Tensor:
    return torch.from_numpy(dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind.name]))


@kinds
def test_sizes_are_those_of_the_gguf_package(kind: BlockType) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == (kind.size, kind.nbytes)


@kinds
def test_decodes_to_the_bits_of_the_gguf_package(kind: BlockType) -> None:
    found, wanted = weight_of(kind).dequantize(), decoded_elsewhere(random_rows(kind), kind)
    assert np.array_equal(found.numpy().view(np.int32), wanted.numpy().view(np.int32))


@kinds
def test_any_bytes_come_back(kind: BlockType) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (ROWS, BLOCKS * kind.nbytes), generator=generator, dtype=torch.uint8)
    fmt = Gguf(kind.name)
    assert torch.equal(fmt.pack(fmt.unpack({"weight": rows}))["weight"], rows)


@kinds
def test_fields_have_the_values_that_they_mean(kind: BlockType) -> None:
    held = unpack(random_rows(kind).unflatten(1, (-1, kind.nbytes)), kind)
    assert int(held.codes.max()) == 2**kind.bits - 1
    assert (held.minimum is not None, held.scales is not None) == (kind.has_mins, kind.has_groups)
    if held.mins is not None:
        assert int(held.mins.min()) >= 0


@kinds
@pytest.mark.parametrize(("start", "stop"), [(1, 3), (0, 4), (0.5, 2.5), (0.25, 1)])
def test_a_cut_decodes_to_that_part(kind: BlockType, start: float, stop: float) -> None:
    weight = weight_of(kind)
    inputs = slice(int(start * kind.size), int(stop * kind.size))
    cut = weight.cut(slice(1, 4), inputs)
    assert cut.shape == (3, inputs.stop - inputs.start)
    assert torch.equal(cut.dequantize(), weight.dequantize()[1:4, inputs])


def test_inputs_and_outputs_in_any_order() -> None:
    weight = weight_of(TYPES["Q4_K"])
    order, rows = torch.randperm(weight.shape[1]), torch.tensor([5, 0, 3])
    assert torch.equal(weight.cut(rows, order).dequantize(), weight.dequantize()[rows][:, order])


def test_a_format_says_what_a_layer_takes() -> None:
    fmt = Gguf("Q6_K")
    assert (fmt.bits, fmt.nbytes((8, 512)), fmt.describe()) == (6, 8 * 2 * 210, "Q6_K")
    narrowed = fmt.narrow({"weight": random_rows(fmt.blocks)}, (ROWS, 1024), slice(2, 4), slice(300, 600))
    assert (narrowed.inputs, narrowed.parts["weight"].shape) == (slice(256, 768), (2, 2 * 210))


def test_a_cut_through_blocks_is_not_stored_again() -> None:
    fmt = Gguf("Q4_K")
    halved = weight_of(fmt.blocks).cut(slice(0, 2), slice(0, 128))
    with pytest.raises(CannotHold, match="cut through its blocks"):
        fmt.pack(halved)
    with pytest.raises(CannotHold, match="set to blocks of Q4_K"):
        fmt.pack(weight_of(TYPES["Q5_K"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mins": None}, "mins is absent, but must be int8"),
        ({"codes": torch.zeros(2, 32, dtype=torch.uint8)}, r"codes is uint8 \[2, 32\], but must be uint8 \[2, 256\]"),
        ({"scale": torch.zeros(2)}, "scale is float32"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, Tensor | None], said: str) -> None:
    kind = TYPES["Q4_K"]
    held = unpack(torch.zeros(2, kind.nbytes, dtype=torch.uint8), kind)
    with pytest.raises(InputError, match=said):
        pack(replace(held, **change), kind)


def test_fields_that_a_type_has_not_are_refused() -> None:
    kind = TYPES["Q4_0"]
    halves = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(InputError, match="minimum is float16"):
        pack(Blocks(torch.zeros(2, 32, dtype=torch.uint8), halves, halves), kind)


def test_wrong_bytes_and_rows_are_refused() -> None:
    with pytest.raises(InputError, match=r"uint8 \[\.\.\., 18\], not uint8 \[\.\.\., 17\]"):
        unpack(torch.zeros(2, 17, dtype=torch.uint8), TYPES["Q4_0"])
    with pytest.raises(InputError, match="300, which 256 does not divide"):
        Gguf("Q4_K").check((8, 300))
    with pytest.raises(InputError, match="gguf: kind is 'Q9_0'"):
        Gguf("Q9_0")
