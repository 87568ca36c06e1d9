"""Which experts tokens go to, against the plain meaning, and tiles against what they must be: every pair once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.linear.dense.weight import lay_out
from quantkit.kernels.linear.grouped import routing
from quantkit.kernels.linear.grouped.router import route_tokens
from quantkit.kernels.linear.grouped.routes import Routes, Rule, most_tiles
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.reference.experts import choose_experts

pytestmark = pytest.mark.kernel

RULES = {
    "softmax": (Rule(2), 6),
    "plain sums": (Rule(3, normalized=False, scale=2.5), 8),
    "all experts": (Rule(5), 5),
    "one expert": (Rule(1, normalized=False), 1),
    "corrected": (Rule(4, scoring="sigmoid"), 24),
    "groups of softmax": (Rule(3, groups=3, groups_chosen=2), 12),
    "groups of sigmoid": (Rule(4, scoring="sigmoid", groups=4, groups_chosen=2, scale=2.5), 20),
}


def random(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def check_tiles(routes: Routes, experts: int) -> None:
    """Tiles cover `order` without gaps, expert by expert, and `order` has every pair once, each under its expert."""
    pairs = routes.pairs
    expert, first, end = routes.tiles.tolist()
    used = [number for number in range(routes.most) if expert[number] >= 0]
    assert used == list(range(len(used)))
    assert len(used) <= most_tiles(pairs, experts, routes.tile) == routes.most
    assert sorted(routes.order.tolist()) == list(range(pairs))
    chosen, place = routes.chosen.flatten(), 0
    for number in used:
        assert first[number] == place
        place = min(place + routes.tile, end[number])
        assert set(chosen[routes.order[first[number] : place].long()].tolist()) == {expert[number]}
        last = number + 1 == len(used)
        assert (last or expert[number + 1] != expert[number]) == (place == end[number])
    assert place == pairs
    by_expert = chosen[routes.order.long()].long() * pairs + routes.order
    assert bool((by_expert.diff() > 0).all())  # within an expert in the order of tokens


def check_choice(routes: Routes, logits: Tensor, rule: Rule, correction: Tensor | None) -> None:
    options = {name: value for name, value in vars(rule).items() if name != "per_token"}
    chosen, weights = choose_experts(logits, rule.per_token, correction=correction, **options)
    ascending = chosen.sort(-1)
    assert torch.equal(routes.chosen.long(), ascending.values)
    assert routes.weights.dtype == logits.dtype
    wanted = weights.gather(-1, ascending.indices)
    torch.testing.assert_close(routes.weights, wanted, rtol=1e-5 if logits.dtype == torch.float32 else 8e-3, atol=1e-7)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_rule(name: str, several: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program, and by several in three launches."""
    if several:
        monkeypatch.setattr(routing, "_ONE_PROGRAM", 0)
        monkeypatch.setattr(routing, "_BLOCK", 64)
        monkeypatch.setattr(routing, "_SCANNED", 32)
    rule, experts = RULES[name]
    logits = random(17, experts, device=device)
    correction = random(experts, device=device, seed=1) if name in ("corrected", "groups of sigmoid") else None
    routes = route(logits, rule, 4, correction)
    check_choice(routes, logits, rule, correction)
    check_tiles(routes, experts)


@pytest.mark.parametrize("tokens", [1, 3, 32, 33, 130])
def test_any_number_of_tokens(tokens: int, device: str) -> None:
    """Of 128 experts; 32 tokens are the most that one program takes."""
    logits = random(tokens, 140, device=device).bfloat16()[:, 5:133]  # rows with a stride
    logits += torch.arange(128, device=device) * 1e-2  # fewer equal ones
    routes = route(logits, Rule(8), 8)
    check_choice(routes, logits, Rule(8), None)
    check_tiles(routes, 128)


@pytest.mark.parametrize("several", [False, True])
def test_experts_of_several_ranks(several: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All choose alike; each lists the pairs of its own experts, by planes of its own, and others count nothing."""
    if several:
        monkeypatch.setattr(routing, "_ONE_PROGRAM", 0)
        monkeypatch.setattr(routing, "_BLOCK", 64)
    logits, rule = random(17, 12, device=device), Rule(3)
    whole = route(logits, rule, 4)
    listed: list[int] = []
    for own in (range(5), range(5, 6), range(6, 12)):
        routes = route(logits, rule, 4, own=own)
        assert torch.equal(routes.chosen, whole.chosen)
        mine = (routes.chosen >= own.start) & (routes.chosen < own.stop)
        assert torch.equal(routes.weights, torch.where(mine, whole.weights, 0.0))
        plane, first, end = routes.tiles.tolist()
        used = [number for number, one in enumerate(plane) if one >= 0]
        assert routes.most == most_tiles(routes.pairs, len(own), 4) >= len(used)
        for number in used:
            pairs = routes.order[first[number] : min(first[number] + 4, end[number])].tolist()
            assert {int(routes.chosen.flatten()[pair]) for pair in pairs} == {plane[number] + own.start}
            listed += pairs
        assert len(used) == 0 or end[used[-1]] == int(mine.sum())
    assert sorted(listed) == list(range(whole.pairs))


@pytest.mark.parametrize("own", [range(3, 3), range(-1, 2), range(4, 7), range(0, 4, 2)])
def test_experts_that_are_not_there(own: range, device: str) -> None:
    with pytest.raises(InputError, match=r"experts .* are asked for, but there are 6"):
        route(random(2, 6, device=device), Rule(2), 4, own=own)


@pytest.mark.parametrize("tokens", [9, 80])
def test_one_expert_of_all_and_one_of_none(tokens: int, device: str) -> None:
    logits = random(tokens, 100, device=device)
    logits[:, 7], logits[:, 99] = 50.0, -50.0
    routes = route(logits, Rule(2), 4)
    check_tiles(routes, 100)
    assert int((routes.chosen == 7).sum()) == tokens
    assert int((routes.chosen == 99).sum()) == 0


def test_equal_and_broken_logits(device: str) -> None:
    """Of equals the lower numbers; a token of NaN still has experts, and changes nobody else's."""
    logits = random(5, 6, device=device)
    whole = route(logits, Rule(2), 4)
    logits[1], logits[3] = 0.25, float("nan")
    routes = route(logits, Rule(2), 4)
    check_tiles(routes, 6)
    assert routes.chosen[1].tolist() == [0, 1]
    others = [0, 2, 4]
    assert torch.equal(routes.chosen[others], whole.chosen[others])
    assert torch.equal(routes.weights[others], whole.weights[others])


@pytest.mark.parametrize(("tokens", "experts", "inputs"), [(1, 20, 300), (3, 5, 1100), (21, 33, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_and_its_choice_in_one_launch(
    tokens: int, experts: int, inputs: int, dtype: torch.dtype, device: str
) -> None:
    """Twice, since tickets must be 0 again; with the logits that it would have as a linear."""
    x = random(tokens, inputs + 8, device=device).to(dtype)[:, 4:-4]
    router = lay_out((0.2 * random(experts, inputs, device=device, seed=1)).to(dtype))
    correction = random(experts, device=device, seed=2)
    rule = Rule(4, scoring="sigmoid", scale=1.5)
    logits = (x.double() @ router.values.double().mT).to(dtype)
    for _ in range(2):
        routes = route_tokens(x, router, rule, 4, correction)
        assert (routes.order, routes.tiles, routes.most) == (None, None, min(4 * tokens, experts))
        check_choice(routes, logits, rule, correction)
        listed = route_tokens(x, router, rule, 4, correction, listed=True)
        check_choice(listed, logits, rule, correction)
        check_tiles(listed, experts)
        assert not router.tickets.any()


def test_a_router_lists_the_experts_of_its_rank(device: str) -> None:
    """As the launch without a matmul does."""
    x, rule = random(19, 128, device=device).half(), Rule(3)
    router = lay_out((0.2 * random(12, 128, device=device, seed=1)).half())
    logits = (x.double() @ router.values.double().mT).half()
    for own in (range(5), range(5, 6), range(6, 12)):
        found, wanted = route_tokens(x, router, rule, 4, own=own, listed=True), route(logits, rule, 4, own=own)
        assert torch.equal(found.chosen, wanted.chosen)
        ours = (found.chosen >= own.start) & (found.chosen < own.stop)
        assert torch.equal(found.order[: int(ours.sum())], wanted.order[: int(ours.sum())])
        used = int((wanted.tiles[0] >= 0).sum())
        assert torch.equal(found.tiles[:, :used], wanted.tiles[:, :used])
        assert bool((found.tiles[0, used:] == -1).all())


def test_few_tokens_only(device: str) -> None:
    router = lay_out(torch.zeros(4, 128, device=device).bfloat16())
    with pytest.raises(InputError, match="65 tokens, but at most 64"):
        route_tokens(torch.zeros(65, 128, device=device).bfloat16(), router, Rule(2), 4)
    six = lay_out(torch.zeros(6, 128, device=device).bfloat16())
    with pytest.raises(InputError, match="258 pairs, but at most 256 are listed"):
        route_tokens(torch.zeros(43, 128, device=device).bfloat16(), six, Rule(6), 4, listed=True)
    assert route_tokens(torch.zeros(0, 128, device=device).bfloat16(), router, Rule(2), 4).pairs == 0


def test_no_tokens(device: str) -> None:
    routes = route(torch.empty(0, 6, device=device), Rule(2), 4)
    assert (routes.pairs, routes.most, routes.per_token) == (0, 0, 2)


@pytest.mark.parametrize(
    ("rule", "experts", "message"),
    [
        (Rule(7), 6, "7 experts of a token, but there are 6"),
        (Rule(0), 6, "0 experts of a token"),
        (Rule(2, groups=4, groups_chosen=2), 6, "2 of 4 groups, which do not divide 6 experts"),
        (Rule(2, groups=2, groups_chosen=3), 6, "3 of 2 groups"),
        (Rule(4, groups=3, groups_chosen=1), 6, "1 groups of 2 experts are fewer than the 4 of a token"),
        (Rule(2), 1025, "1025 experts, but at most 1024"),
        (replace(Rule(2), scoring="tanh"), 6, "scoring is 'tanh'"),
    ],
    ids=str,
)
def test_refusals(rule: Rule, experts: int, message: str, device: str) -> None:
    with pytest.raises(InputError, match=message):
        route(torch.zeros(1, experts, device=device), rule, 4)
