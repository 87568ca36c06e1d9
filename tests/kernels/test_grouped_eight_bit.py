"""Routed matmuls of 8-bit weights against the plain meaning: every kind of activations, odd sizes, odd routings."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtFloat8, CtInt8, Format, LlmInt8, QuantizedWeight
from quantkit.kernels.card import KNOWN, Card, pretend
from quantkit.kernels.linear.grouped.choices import candidates, choose
from quantkit.kernels.linear.grouped.experts import sum_of_experts
from quantkit.kernels.linear.grouped.routes import Routes, Rule
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.linear.grouped.stacks import EightBitStack, lay_out, stack_of
from quantkit.kernels.linear.grouped.tile import TileConfig
from quantkit.kernels.linear.grouped.weight import GroupedWeight
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from quantkit.kernels.reference.elementwise import gated_activation
from quantkit.kernels.reference.experts import linear_of_experts

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format] = {
    "llm-int8": LlmInt8(),
    "w8a8": CtInt8(),
    "fp8": CtFloat8(),
    "fp8-static": CtFloat8(strategy="tensor", activations="static"),
    "fp8-exact": CtFloat8(activations="exact"),
    "fp8-block": CtFloat8(strategy="block"),
    "fp8-block-exact": CtFloat8(strategy="block", activations="exact"),
}
EXPERTS = 3
FEW, SPLIT = TileConfig(64, 4, 3), TileConfig(32, 2, 3, splits=2)


def planes_of(
    fmt: Format, count: int, outputs: int, inputs: int, device: str
) -> tuple[GroupedWeight, list[QuantizedWeight]]:
    random = torch.Generator().manual_seed(outputs)
    stack, planes = stack_of(fmt, count), []
    for plane in range(count):
        quantized = fmt.quantize(0.2 * torch.randn(outputs, inputs, generator=random).to(device))
        planes.append(fmt.with_input_scale(quantized, 2.5 + 0.3 * plane))  # each its own, and too small for some values
        stack.put(plane, lay_out(fmt, planes[-1]))
    return stack.finish(torch.randn(count, outputs, device=device).bfloat16()), planes


def rows_with_outliers(tokens: int, inputs: int, device: str) -> Tensor:
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)).to(device)
    x[tokens // 2, inputs // 3] = 9.0
    x[-1, inputs - 1] = -7.5
    return x.bfloat16()


def experts_of(routes: Routes) -> Tensor:
    """Of every pair, by its number."""
    return routes.chosen.flatten().long()


def assert_right(found: Tensor, wanted: Tensor) -> None:
    assert relative_error(found, wanted) < 2 * LARGEST_ERROR["bfloat16"]


def check_products(fmt: Format, tokens: int, per_token: int, logits: Tensor, device: str) -> None:
    """Gate and up of every pair, then down, against the reference of both."""
    bare, width = 200, 136
    x = rows_with_outliers(tokens, bare, device)
    routes = route(logits, Rule(per_token), 8)
    order = routes.order.long()
    gate_up, planes = planes_of(fmt, 2 * EXPERTS, width, bare, device)
    found = gate_up.matmul(x, routes, SPLIT, "silu")
    of_pair = experts_of(routes)
    rows, bias = x.double().repeat_interleave(per_token, 0), gate_up.bias
    assert bias is not None
    halves = [linear_of_experts(rows, 2 * of_pair + part, fmt, planes, bias.double()) for part in (0, 1)]
    assert_right(found, gated_activation(torch.cat(halves, 1).bfloat16(), "silu")[order])
    down, planes = planes_of(fmt, EXPERTS, bare, width, device)
    active = rows_with_outliers(len(order), width, device)
    assert down.bias is not None
    wanted = linear_of_experts(active.double(), of_pair[order], fmt, planes, down.bias.double())
    assert_right(down.matmul(active, routes, FEW)[order], wanted)
    assert int(gate_up.tickets.abs().sum()) == int(down.tickets.abs().sum()) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_activations(name: str, device: str) -> None:
    check_products(FORMATS[name], 5, 2, torch.randn(5, EXPERTS, device=device), device)


@pytest.mark.parametrize("name", ["fp8", "fp8-static", "fp8-block"])
def test_a_card_without_float8(name: str, device: str) -> None:
    """The same numbers in 16 bits; a GPU that has float8 can do without it, too."""
    with pretend(KNOWN["sm_80"]) if device == "cpu" else nullcontext():
        check_products(FORMATS[name], 3, 1, torch.randn(3, EXPERTS, device=device), device)


@pytest.mark.parametrize(
    ("name", "tokens", "per_token", "favourite"),
    [("llm-int8", 1, 1, None), ("llm-int8", 9, 2, 1), ("fp8-block", 1, 3, None), ("fp8-block", 17, 1, 2)],
)
def test_odd_routings(name: str, tokens: int, per_token: int, favourite: int | None, device: str) -> None:
    """One token, all experts of it; an expert that all choose, so that it has several tiles and another has none."""
    logits = torch.randn(tokens, EXPERTS, device=device)
    if favourite is not None:
        logits[:, favourite], logits[:, 0] = 30.0, -30.0
    check_products(FORMATS[name], tokens, per_token, logits, device)


def test_outliers_of_many_rows(device: str) -> None:
    """Of more rows than dense layers copy columns for; here they are listed alone."""
    check_products(LlmInt8(), 65, 1, torch.randn(65, EXPERTS, device=device), device)


@pytest.mark.parametrize("tokens", [1, 7])
def test_outliers_in_every_column(tokens: int, device: str) -> None:
    """Too many to be gathered: nothing is rounded, as LLM.int8 means it here."""
    fmt, inputs, outputs = LlmInt8(), 200, 136
    x = (8 + 9 * torch.rand(tokens, inputs, generator=torch.Generator().manual_seed(2))).bfloat16().to(device)
    x[:, ::2] *= -1
    routes = route(torch.randn(tokens, EXPERTS, device=device), Rule(1), 8)
    down, planes = planes_of(fmt, EXPERTS, outputs, inputs, device)
    order = routes.order.long()
    assert down.bias is not None
    found = down.matmul(x[order], routes, SPLIT)[order]
    wanted = linear_of_experts(x[order].double(), experts_of(routes)[order], fmt, planes, down.bias.double())
    assert_right(found, wanted)


def test_a_whole_layer_as_it_is_chosen(device: str) -> None:
    fmt = FORMATS["fp8"]
    gate_up, _ = planes_of(fmt, 2 * EXPERTS, 64, 128, device)
    down, _ = planes_of(fmt, EXPERTS, 128, 64, device)
    x, logits = rows_with_outliers(3, 128, device), torch.randn(3, EXPERTS, device=device)
    how = (gate_up, down, Rule(2), "silu")
    together = sum_of_experts(x, lambda _: logits, *how)
    alone = sum_of_experts(x[2:], lambda _: logits[2:], *how)
    assert_right(alone, together[2:])


def test_planes_that_differ_are_refused() -> None:
    stack = EightBitStack(2)
    stack.put(0, lay_out(CtInt8(), CtInt8().quantize(torch.ones(8, 64))))
    with pytest.raises(
        InputError, match="experts of one layer differ: one is fp8-token of 8 x 64, others are int8-token"
    ):
        stack.put(1, lay_out(CtFloat8(), CtFloat8().quantize(torch.ones(8, 64))))


@pytest.mark.parametrize("card", KNOWN.values(), ids=KNOWN)
def test_every_choice_can_run(card: Card) -> None:
    """Of any number of tokens: tiles divide padded outputs, no split is empty, and nothing is decoded to memory."""
    gate_up, _ = planes_of(CtInt8(), 2 * EXPERTS, 64, 192, "cpu")
    down, _ = planes_of(CtInt8(), EXPERTS, 192, 64, "cpu")
    for tokens in (1, 2, 7, 33, 100, 1000, 20_000):
        way = choose(gate_up, down, 2 * tokens, card)
        assert 128 % way.gate_up.outputs == 128 % way.down.outputs == 0
        assert not way.decoded
        assert replace(way.gate_up, copies=0) == way.gate_up
        assert len(list(candidates(down, 2 * tokens, EXPERTS))) > 4
