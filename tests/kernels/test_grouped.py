"""Routed matmuls and layers of experts against the plain meaning: every kind of weight, odd sizes, odd routings."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from long_cases import one_of_each
from pairwise import cover
from quantkit.errors import InputError
from quantkit.formats import Awq, CtMxfp4, CtNvfp4, CtPacked, Format, Fp4, Gptq, IntegerWeight, Nf4
from quantkit.kernels.card import KNOWN, Card
from quantkit.kernels.linear.dense import weight as dense
from quantkit.kernels.linear.grouped.choices import Way, candidates, choose
from quantkit.kernels.linear.grouped.combine import combine
from quantkit.kernels.linear.grouped.experts import routes_of, sum_of_experts
from quantkit.kernels.linear.grouped.routes import Rule
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.linear.grouped.stacks import PackedStack
from quantkit.kernels.linear.grouped.tile import TileConfig
from quantkit.kernels.linear.grouped.weight import GroupedPacked, GroupedWeight, lay_out_half
from quantkit.kernels.linear.weight_only.weight import PackedWeight, lay_out
from quantkit.kernels.reference import experts as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from quantkit.kernels.reference.elementwise import gated_activation
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format | None] = {
    "half": None,
    "w4g128": CtPacked(bits=4, group_size=128),
    "awq-w4g64": Awq(bits=4, group_size=64, sym=False),
    "w4g32": CtPacked(bits=4, group_size=32),
    "w4g16-asym": CtPacked(bits=4, group_size=16, sym=False),
    "w4-row": Gptq(bits=4, group_size=-1),
    "w8g32-asym": CtPacked(bits=8, group_size=32, sym=False),
    "w3g64-asym": CtPacked(bits=3, group_size=64, sym=False),
    "w2g32-asym": CtPacked(bits=2, group_size=32, sym=False),
    "nf4": Nf4(),
    "fp4": Fp4(double_quant=True),
    "nf4-plain": Nf4(double_quant=False, block=128),
    "mxfp4": CtMxfp4(),
    "nvfp4": CtNvfp4(),
}
EXPERTS = 3
FEW = Way(8, TileConfig(64, 2, 3, splits=2), TileConfig(128, 4, 3))
DECODED = Way(16, TileConfig(64, 4, 3, depth=64), TileConfig(128, 4, 3, depth=64, streamed=False), decoded=True)


class Layer:
    """Random experts in a format: as kernels take them, and as the reference does."""

    def __init__(
        self,
        fmt: Format | None,
        dtype: torch.dtype,
        device: str,
        experts: int = EXPERTS,
        clip: tuple[float, float] | None = None,
    ) -> None:
        """With a clip there are biases, too."""
        self._experts, self.clip = experts, clip
        group = getattr(fmt, "group_size", 0) or getattr(fmt, "block", 0)
        self.hidden, width = (256, 128) if group == 128 else (192, 64)  # whole chunks and not, as groups allow
        biased = clip is not None
        self.gate_up, self._gate_up = _planes(fmt, width, self.hidden, 2 * experts, dtype, device, biased)
        self.down, self._down = _planes(fmt, self.hidden, width, experts, dtype, device, biased)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """In x's dtype after every step, as the runtime computes it."""
        gate, up = (_linear(x, plane) for plane in self._gate_up[2 * number : 2 * number + 2])
        active = gated_activation(torch.cat([gate, up], 1), "silu", clip=self.clip)
        return _linear(active, self._down[number])

    def meaning(self, x: Tensor, logits: Tensor, per_token: int) -> Tensor:
        chosen, weights = reference.choose_experts(logits, per_token, normalized=True)
        mlps = [lambda x, number=number: self.expert(number, x) for number in range(self._experts)]
        return reference.sum_of_experts(x, chosen, weights, mlps)


Plane = tuple[Tensor, Tensor | None]  # weight and bias


def _linear(x: Tensor, plane: Plane) -> Tensor:
    weight, bias = plane
    y = x.double() @ weight.double().mT
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _planes(
    fmt: Format | None, outputs: int, inputs: int, planes: int, dtype: torch.dtype, device: str, biased: bool
) -> tuple[GroupedWeight, list[Plane]]:
    values = 0.2 * torch.randn(planes, outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    values = values.to(torch.bfloat16).to(dtype).to(device)
    bias = torch.randn(planes, outputs, device=device).to(dtype) if biased else None
    biases: list[Tensor | None] = [None] * planes if bias is None else list(bias)
    if fmt is None:
        return lay_out_half(values, bias), list(zip(values, biases, strict=True))
    quantized = [with_signs(fmt.quantize(plane)) for plane in values]
    decoded = [plane.dequantize(torch.float32) for plane in quantized]
    return stacked([lay_out(plane) for plane in quantized], bias), list(zip(decoded, biases, strict=True))


def stacked(planes: list[PackedWeight], bias: Tensor | None = None) -> GroupedPacked:
    stack = PackedStack(len(planes))
    for number, plane in enumerate(planes):
        stack.put(number, plane)
    return stack.finish(bias)


def assert_right(found: Tensor, wanted: Tensor) -> None:
    assert relative_error(found, wanted) < 2 * LARGEST_ERROR[str(found.dtype)[6:]]


@pytest.mark.parametrize(("name", "dtype", "way"), one_of_each(cover(FORMATS, ("bfloat16", "float16"), (FEW, DECODED))))
def test_every_kind_of_weight(name: str, dtype: str, way: Way, device: str) -> None:
    layer = Layer(FORMATS[name], getattr(torch, dtype), device, experts=2)
    x = torch.randn(2, layer.hidden, device=device).to(getattr(torch, dtype))
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0]], device=device).to(x.dtype)
    found = sum_of_experts(x, lambda _: logits, layer.gate_up, layer.down, Rule(1), "silu", way=way)
    assert_right(found, layer.meaning(x, logits, 1))


@pytest.mark.parametrize(("name", "way"), [("half", FEW), ("mxfp4", FEW), ("mxfp4", DECODED)])
def test_biases_and_clipped_gates(name: str, way: Way, device: str) -> None:
    """Of gpt-oss; the limit is so low that gate and up are often beyond it."""
    layer = Layer(FORMATS[name], torch.bfloat16, device, clip=(1.5, 1.702))
    x, logits = torch.randn(5, layer.hidden, device=device).bfloat16(), torch.randn(5, EXPERTS, device=device)
    how = (layer.gate_up, layer.down, Rule(2), "silu")
    found = sum_of_experts(x, lambda _: logits.bfloat16(), *how, clip=layer.clip, way=way)
    assert_right(found, layer.meaning(x, logits.bfloat16(), 2))


ROUTINGS = [(1, 1, None), (1, 3, None), (9, 2, 1), (17, 1, 2), (4, 3, None)]  # tokens, experts of each, a favourite


@pytest.mark.parametrize(
    ("routing", "name"), one_of_each((routing, name) for routing in ROUTINGS for name in ("half", "w4g32"))
)
def test_odd_routings(routing: tuple[int, int, int | None], name: str, device: str) -> None:
    """One token, all experts of every token, an expert that all choose and so one that none does; several tiles."""
    tokens, per_token, favourite = routing
    layer = Layer(FORMATS[name], torch.bfloat16, device)
    x = torch.randn(tokens, layer.hidden, device=device).bfloat16()
    logits = torch.randn(tokens, EXPERTS, device=device)
    if favourite is not None:
        logits[:, favourite], logits[:, 0] = 30.0, -30.0
    logits = logits.bfloat16()
    found = sum_of_experts(x, lambda _: logits, layer.gate_up, layer.down, Rule(per_token), "silu", way=FEW)
    assert_right(found, layer.meaning(x, logits, per_token))


def test_a_token_does_not_see_the_others(device: str) -> None:
    """To the bit: alone, and among tokens that fill tiles before it."""
    layer = Layer(FORMATS["w4g32"], torch.bfloat16, device)
    x, logits = torch.randn(11, layer.hidden, device=device).bfloat16(), torch.randn(11, EXPERTS, device=device)
    how = (layer.gate_up, layer.down, Rule(2), "silu")
    logits = logits.bfloat16()
    together = sum_of_experts(x, lambda _: logits, *how, way=FEW)
    for row in (0, 10):
        alone = sum_of_experts(x[row : row + 1], lambda _, row=row: logits[row : row + 1], *how, way=FEW)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("tokens", [3, 17])
def test_a_router_by_its_weight(tokens: int, device: str) -> None:
    """Few tokens are routed in the launch that multiplies, and not listed; both ways choose as the logits say."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=random).bfloat16().to(device)
    router = dense.lay_out(torch.randn(5, 64, generator=random).bfloat16().to(device))
    routes = routes_of(x, router, Rule(2), FEW)
    assert (routes.order is None) == (tokens <= FEW.tile)  # FEW shares inputs, which several tiles of a program do not
    logits = (x.double() @ router.values.double().mT).bfloat16()
    chosen, _ = reference.choose_experts(logits, 2, normalized=True)
    assert torch.equal(routes.chosen.long(), chosen.sort(-1).values)
    by_function = routes_of(x, lambda x: (x.double() @ router.values.double().mT).bfloat16(), Rule(2), FEW)
    assert by_function.order is not None
    assert torch.equal(by_function.chosen, routes.chosen)


@pytest.mark.parametrize(
    ("name", "tokens", "splits", "own"),
    [
        ("half", 1, 2, range(5)),
        ("w4g32", 7, 2, range(5)),
        ("nf4", 8, 1, range(1, 3)),
        ("w4g32", 2, 2, range(4)),  # more experts than pairs, and some of another rank
        ("half", 30, 1, range(2, 5)),
        ("w4g32", 19, 1, range(5)),
    ],
)
def test_pairs_that_nobody_listed(name: str, tokens: int, splits: int, own: range, device: str) -> None:
    """To the bit what comes of a list, under the numbers of the pairs; several tiles of an expert too."""
    layer = Layer(FORMATS[name], torch.bfloat16, device, experts=len(own))
    logits = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(tokens)).to(device)
    logits[:, 2] += 3  # which most tokens choose
    routes = route(logits, Rule(2), 8, own=own)
    assert routes.order is not None
    listed = routes.order[: int((routes.weights != 0).sum())].long()  # those of other ranks count 0
    x = torch.randn(tokens, layer.hidden, device=device).bfloat16()
    how, active = TileConfig(64, 2, 3, splits=splits), {}
    for used in (routes, routes.unlisted):
        active[used] = layer.gate_up.matmul(x, used, how, "silu")
    assert torch.equal(active[routes][: len(listed)], active[routes.unlisted][listed])
    found = [layer.down.matmul(active[used], used, how)[listed] for used in (routes, routes.unlisted)]
    assert torch.equal(*found)


def scattered(plane: IntegerWeight, seed: int) -> IntegerWeight:
    """The same weight under act-order: columns in another order, each with the group that it had."""
    order = torch.randperm(plane.shape[1], generator=torch.Generator().manual_seed(seed)).to(plane.codes.device)
    return replace(plane, codes=plane.codes[:, order], group_of=plane.input_groups()[order].int())


@pytest.mark.parametrize("way", [FEW, DECODED], ids=("few", "decoded"))
def test_planes_in_orders_of_their_own(way: Way, device: str) -> None:
    """Act-order in some planes, zero points in others; the rest gets what means neither."""
    fmt = Gptq(bits=4, group_size=32, sym=False)
    symmetric = Gptq(bits=4, group_size=32)
    values = 0.2 * torch.randn(2 * EXPERTS, 64, 64, generator=torch.Generator().manual_seed(3)).to(device)
    planes = [(symmetric if number % 2 == 0 else fmt).quantize(plane) for number, plane in enumerate(values)]
    planes = [scattered(plane, number) if number % 3 else plane for number, plane in enumerate(planes)]
    weight = stacked([lay_out(plane) for plane in planes])
    x = torch.randn(2, 64, device=device).half()
    routes = route(torch.randn(2, EXPERTS, device=device), Rule(2), way.tile)
    used = weight.in_half(torch.float16) if way.decoded else weight
    found = used.matmul(x, routes, replace(way.gate_up, splits=1), "gelu_pytorch_tanh")
    for place, pair in enumerate(routes.order.tolist()):
        expert, row = int(routes.chosen.flatten()[pair]), x[pair // 2].double()
        both = torch.cat([plane.dequantize(torch.float64) @ row for plane in planes[2 * expert : 2 * expert + 2]])
        assert_right(found[place], gated_activation(both[None].half(), "gelu_pytorch_tanh")[0])


@pytest.mark.parametrize("gated", [None, True, False])
def test_sums(gated: bool | None, device: str) -> None:
    """Without a shared expert, with one and its gate, and with one alone."""
    y, weights = torch.randn(9, 530, device=device).bfloat16(), torch.rand(3, 3, device=device).bfloat16()
    shared = None if gated is None else torch.randn(3, 600, device=device).bfloat16()[:, :530]
    gate = torch.randn(3, 1, device=device).bfloat16() if gated else None
    total = torch.zeros(3, 530, device=device)
    for slot in range(3):
        total += y.view(3, 3, 530)[:, slot].float() * weights[:, slot, None].float()
    wanted = total.bfloat16()
    if shared is not None:
        wanted = reference.add_shared_expert(wanted, shared, gate)
    found = combine(y, weights, shared, gate)
    # Sums in float32 and a GPU's sigmoid may fall to the other side: by a step of bf16 at 1, also where terms cancel.
    torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=2**-7)
    assert float((found == wanted).float().mean()) > 0.95


def test_no_tokens(device: str) -> None:
    layer = Layer(None, torch.bfloat16, device)
    empty = torch.empty(0, layer.hidden, device=device).bfloat16()
    logits = torch.empty(0, EXPERTS, device=device).bfloat16()
    assert sum_of_experts(empty, lambda _: logits, layer.gate_up, layer.down, Rule(2), "silu").shape == (
        0,
        layer.hidden,
    )


def test_refusals(device: str) -> None:
    layer = Layer(FORMATS["w4g32"], torch.bfloat16, device)
    routes = route(torch.randn(2, EXPERTS, device=device), Rule(2), 8)
    x = torch.zeros(2, layer.hidden, device=device).bfloat16()
    with pytest.raises(InputError, match=r"x has shape \[2, 192\], but must be \[4, 64\]"):
        layer.down.matmul(x, routes, TileConfig())
    with pytest.raises(InputError, match="activation 'relu'"):
        layer.gate_up.matmul(x, routes, TileConfig(), "relu")
    with pytest.raises(InputError, match="tiles of 96 outputs do not divide 128 padded outputs"):
        layer.gate_up.matmul(x, routes, TileConfig(outputs=96), "silu")
    with pytest.raises(InputError, match="x is float32"):
        layer.gate_up.matmul(x.float(), routes, TileConfig(), "silu")
    biased = replace(layer.gate_up, bias=torch.zeros(2 * EXPERTS, 8, device=device).bfloat16())
    with pytest.raises(InputError, match=r"bias has shape \[6, 8\], but must be \[6, 64\]"):
        biased.matmul(x, routes, TileConfig(), "silu")
    several = route(torch.randn(9, EXPERTS, device=device), Rule(2), 8).unlisted
    with pytest.raises(InputError, match="18 pairs in tiles of 8 and 2 splits must be listed"):
        layer.gate_up.matmul(torch.cat([x] * 5)[:9], several, TileConfig(splits=2), "silu")
    stack = PackedStack(2)
    stack.put(0, lay_out(CtPacked(group_size=32).quantize(torch.ones(8, 64))))
    with pytest.raises(InputError, match="experts of one layer differ: one is int4-g16 of 8 x 64, others are int4-g32"):
        stack.put(1, lay_out(CtPacked(group_size=16).quantize(torch.ones(8, 64))))


@pytest.mark.parametrize("card", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("name", ["half", "w4g32", "nf4", "mxfp4"])
def test_every_choice_can_run(name: str, card: Card) -> None:
    """Of any number of tokens: tiles divide padded outputs, no split is empty, and many tokens are decoded once."""
    layer = Layer(FORMATS[name], torch.bfloat16, "cpu")
    for tokens in (1, 2, 7, 33, 100, 1000, 20_000):
        way = choose(layer.gate_up, layer.down, 2 * tokens, card)
        assert 128 % way.gate_up.outputs == 128 % way.down.outputs == 0
        assert way.decoded == (name != "half" and 2 * tokens > 64 * EXPERTS)
        for weight in (layer.gate_up, layer.down):
            tried = list(candidates(weight, 2 * tokens, EXPERTS))
            assert len(tried) == len(set(tried)) > 4
