"""What a format says about itself: its bytes, what becomes of inputs, and layers that it cannot hold."""

import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import Awq, CtFloat8, CtInt8, CtMxfp4, CtNvfp4, CtPacked, Format, Fp4, Gptq, LlmInt8, Nf4
from quantkit.formats.base import InputRounding

STATE_TEXT = 24  # bytes of a layer: bitsandbytes keeps a JSON text whose length depends on the digits of a float
STATIC = CtFloat8(strategy="tensor", activations="static")
EXACT = [Gptq(), Gptq(bits=3), Awq(), CtPacked(bits=5), CtPacked(sym=False), CtInt8(), CtFloat8(), LlmInt8(), STATIC]
EXACT += [CtMxfp4(), CtNvfp4()]


@pytest.mark.parametrize("fmt", [*EXACT, CtFloat8(strategy="block"), Nf4(), Nf4(double_quant=False), Fp4(block=256)])
def test_bytes_are_those_of_the_packed_parts(fmt: Format) -> None:
    quantized = fmt.with_input_scale(fmt.quantize(torch.randn(256, 384)), 3.0)
    packed = sum(part.nbytes for part in fmt.pack(quantized).values())
    assert abs(fmt.nbytes((256, 384)) - packed) <= (0 if fmt in EXACT else STATE_TEXT)


@pytest.mark.parametrize(
    ("fmt", "rounding"),
    [
        (Gptq(), None),
        (Nf4(), None),
        (CtFloat8(activations="exact"), None),
        (CtFloat8(), InputRounding("fp8")),
        (STATIC, InputRounding("fp8", calibrated=True)),
        (CtInt8(), InputRounding("int8")),
        (CtPacked(activations="fp8"), InputRounding("fp8")),
        (LlmInt8(threshold=5.0), InputRounding("int8", outlier_threshold=5.0)),
    ],
)
def test_what_becomes_of_inputs(fmt: Format, rounding: InputRounding | None) -> None:
    assert fmt.input_rounding == rounding


def test_a_layer_that_cannot_be_held_is_named() -> None:
    with pytest.raises(InputError, match=r"^a\.b \[8 x 100\] as gptq W4 g128 sym: .* 128 does not divide"):
        Gptq().check_layer("a.b", (8, 100))
