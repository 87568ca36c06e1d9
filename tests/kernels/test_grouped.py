"""Routed matmuls and layers of experts against the plain meaning: every kind of weight, odd sizes, odd routings."""

import pytest
import torch
from torch import Tensor

from pairwise import cover
from quantkit.errors import InputError
from quantkit.formats import Awq, CtPacked, Format, Fp4, Gptq, Nf4
from quantkit.kernels.card import KNOWN
from quantkit.kernels.linear.grouped.choices import Way, candidates, choose
from quantkit.kernels.linear.grouped.combine import combine
from quantkit.kernels.linear.grouped.experts import sum_of_experts
from quantkit.kernels.linear.grouped.routing import Rule, route
from quantkit.kernels.linear.grouped.tile import TileConfig
from quantkit.kernels.linear.grouped.weight import GroupedPacked, GroupedWeight, PackedStack, lay_out_half
from quantkit.kernels.linear.weight_only.weight import PackedWeight, lay_out
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from quantkit.kernels.reference.elementwise import gated_activation

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format | None] = {
    "half": None,
    "w4g128": CtPacked(bits=4, group_size=128),
    "awq-w4g64": Awq(bits=4, group_size=64, sym=False),
    "w4g16-asym": CtPacked(bits=4, group_size=16, sym=False),
    "w4-row": Gptq(bits=4, group_size=-1),
    "w8g32-asym": CtPacked(bits=8, group_size=32, sym=False),
    "w3g64-asym": CtPacked(bits=3, group_size=64, sym=False),
    "w2g32-asym": CtPacked(bits=2, group_size=32, sym=False),
    "nf4": Nf4(),
    "fp4": Fp4(double_quant=True),
    "nf4-plain": Nf4(double_quant=False, block=128),
}
EXPERTS = 3
FEW = Way(8, TileConfig(64, 2, 3, splits=2), TileConfig(128, 4, 3))
DECODED = Way(16, TileConfig(64, 4, 3, depth=64), TileConfig(128, 4, 3, depth=64, streamed=False), decoded=True)


class Layer:
    """Random experts in a format: as kernels take them, and as the reference does."""

    def __init__(self, fmt: Format | None, dtype: torch.dtype, device: str) -> None:
        group = getattr(fmt, "group_size", 0) or getattr(fmt, "block", 0)
        self.hidden, width = (256, 128) if group == 128 else (192, 64)  # whole chunks and not, as groups allow
        self.gate_up, self._gate_up = _planes(fmt, width, self.hidden, 2 * EXPERTS, dtype, device)
        self.down, self._down = _planes(fmt, self.hidden, width, EXPERTS, dtype, device)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """In x's dtype after every step, as the runtime computes it."""
        gate, up = (x.double() @ plane.double().mT for plane in self._gate_up[2 * number : 2 * number + 2])
        active = gated_activation(torch.cat([gate, up], 1).to(x.dtype), "silu")
        return (active.double() @ self._down[number].double().mT).to(x.dtype)

    def meaning(self, x: Tensor, logits: Tensor, per_token: int) -> Tensor:
        chosen, weights = reference.choose_experts(logits, per_token, normalized=True)
        mlps = [lambda x, number=number: self.expert(number, x) for number in range(EXPERTS)]
        return reference.sum_of_experts(x, chosen, weights, mlps)


def _planes(
    fmt: Format | None, outputs: int, inputs: int, planes: int, dtype: torch.dtype, device: str
) -> tuple[GroupedWeight, list[Tensor]]:
    values = 0.2 * torch.randn(planes, outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    values = values.to(torch.bfloat16).to(dtype).to(device)
    if fmt is None:
        return lay_out_half(values), list(values)
    quantized = [fmt.quantize(plane) for plane in values]
    return stacked([lay_out(plane) for plane in quantized]), [plane.dequantize(torch.float32) for plane in quantized]


def stacked(planes: list[PackedWeight]) -> GroupedPacked:
    stack = PackedStack(len(planes))
    for number, plane in enumerate(planes):
        stack.put(number, plane)
    return stack.finish()


def assert_right(found: Tensor, wanted: Tensor) -> None:
    assert relative_error(found, wanted) < 2 * LARGEST_ERROR[str(found.dtype)[6:]]


@pytest.mark.parametrize(("name", "dtype", "way"), cover(FORMATS, ("bfloat16", "float16"), (FEW, DECODED)))
def test_every_kind_of_weight(name: str, dtype: str, way: Way, device: str) -> None:
    layer = Layer(FORMATS[name], getattr(torch, dtype), device)
    x = torch.randn(3, layer.hidden, device=device).to(getattr(torch, dtype))
    logits = torch.randn(3, EXPERTS, device=device).to(x.dtype)
    found = sum_of_experts(x, logits, layer.gate_up, layer.down, Rule(2), "silu", way=way)
    assert_right(found, layer.meaning(x, logits, 2))
