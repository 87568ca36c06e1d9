"""The GPU's kernels take parts of layers, in every format: under Triton's interpreter where there is no GPU."""

from itertools import product

import pytest
import torch

from quantkit.formats import CtFloat8, CtInt8, CtPacked, Format, Fp4, Gptq, Index, LlmInt8, Nf4
from quantkit.kernels.card import NO_GPU
from quantkit.kernels.linear.eight_bit.weight import lay_out as lay_out_eight_bit
from quantkit.kernels.linear.eight_bit.weight import takes
from quantkit.kernels.linear.op import run
from quantkit.kernels.linear.weight_only.weight import lay_out as lay_out_packed
from quantkit.kernels.reference import linear as reference

pytestmark = pytest.mark.kernel

FORMATS = (
    *(Gptq(), Gptq(sym=False, bits=8), CtPacked(bits=3, group_size=32), Nf4(), Nf4(double_quant=False), Fp4()),
    *(LlmInt8(), CtInt8(), CtFloat8(), CtFloat8(activations="exact"), CtFloat8(strategy="block")),
)
# Of 192 outputs and 640 inputs: 10 blocks of 64 in a row, so that 256 nested scales are cut apart.
PARTS: dict[str, tuple[Index, Index]] = {
    "outputs": (slice(128, 192), slice(0, 640)),
    "inputs": (slice(0, 192), slice(384, 640)),
    "both": (slice(0, 128), slice(128, 384)),
}

LONG = (pytest.mark.long,)


def quick(part: str, fmt: Format) -> bool:
    """Both cuts at once say little that each alone does not, and packed formats are slow to interpret."""
    return part != "both" or takes(fmt) or fmt == FORMATS[0] or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("part", "fmt"),
    [
        pytest.param(part, fmt, id=f"{part}-{fmt.name} {fmt.describe()}", marks=() if quick(part, fmt) else LONG)
        for part, fmt in product(PARTS, FORMATS)
    ],
)
def test_parts_are_multiplied(part: str, fmt: Format) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    whole = fmt.quantize(torch.randn(192, 640, generator=generator).mul(0.1).to(device, torch.bfloat16))
    cut = whole.cut(*PARTS[part])
    weight = lay_out_eight_bit(fmt, cut) if takes(fmt) else lay_out_packed(cut)
    x = torch.randn(3, cut.shape[1], generator=generator).to(device, torch.bfloat16)
    found = run(weight.default(8, NO_GPU), x, weight).float()
    wanted = reference.linear(x.float(), fmt, cut)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2
