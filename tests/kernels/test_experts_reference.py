"""What a layer with experts means, against the same sum written out over all experts, and transformers' own blocks."""

from functools import partial

import pytest
import torch
from torch import Tensor

from quantkit.arch import FAMILIES
from quantkit.kernels.reference.experts import add_shared_expert, choose_experts, sum_of_experts
from quantkit.stages import Experts
from tiny_models import SETTINGS, WITH_EXPERTS, build_model

TOKENS, HIDDEN, EXPERTS, CHOSEN = 9, 16, 5, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def multiply(seen: list[int], weights: Tensor, number: int, x: Tensor) -> Tensor:
    seen.append(number)
    return x @ weights[number]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("favourite", [None, 3])
def test_the_sum_over_the_chosen(normalized: bool, favourite: int | None) -> None:
    """Every token may choose one expert, and then some are chosen by none: these are not computed."""
    x, logits, weights, seen = random(TOKENS, HIDDEN), random(TOKENS, EXPERTS, seed=1), random(5, 16, 16, seed=2), []
    logits[:, 0] = -50.0
    if favourite is not None:
        logits[:, favourite] = 50.0
    chosen, share = choose_experts(logits, CHOSEN, normalized=normalized)
    found = sum_of_experts(x, chosen, share, [partial(multiply, seen, weights, number) for number in range(EXPERTS)])

    every = logits.softmax(-1)
    kept = every >= every.topk(CHOSEN).values[:, -1:]
    wanted_share = every * kept / ((every * kept).sum(-1, keepdim=True) if normalized else 1)
    torch.testing.assert_close(found, torch.einsum("te,th,eho->to", wanted_share, x, weights))
    assert seen == [number for number in range(EXPERTS) if kept[:, number].any()]
    assert 0 not in seen
    assert favourite is None or bool(kept[:, favourite].all())


def test_a_token_does_not_see_the_others() -> None:
    x, weights = random(TOKENS, HIDDEN), random(EXPERTS, HIDDEN, HIDDEN, seed=2)
    experts = [partial(multiply, [], weights, number) for number in range(EXPERTS)]
    chosen, share = choose_experts(random(TOKENS, EXPERTS, seed=1), CHOSEN, normalized=True)
    together = sum_of_experts(x, chosen, share, experts)
    alone = [sum_of_experts(*(part[row : row + 1] for part in (x, chosen, share)), experts) for row in range(TOKENS)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=1e-6)


def test_weights_come_in_the_dtype_of_the_model() -> None:
    logits = random(TOKENS, EXPERTS).bfloat16()
    chosen, share = choose_experts(logits, CHOSEN, normalized=True)
    wanted = logits.float().softmax(-1).topk(CHOSEN)
    assert share.dtype == torch.bfloat16
    assert torch.equal(chosen, wanted.indices)
    torch.testing.assert_close(share.float(), wanted.values / wanted.values.sum(-1, keepdim=True), rtol=4e-3, atol=0)
    x = random(TOKENS, HIDDEN).bfloat16()
    assert sum_of_experts(x, chosen, share, [lambda x: x] * EXPERTS).dtype == torch.bfloat16


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(
    ("experts", "per_token", "groups", "groups_chosen"), [(6, 2, 3, 1), (12, 5, 4, 3), (7, 3, 1, 1)]
)
def test_groups_written_out(
    experts: int, per_token: int, groups: int, groups_chosen: int, corrected: bool, scoring: str
) -> None:
    """Token by token, group by group; what a correction adds counts for the choice alone."""
    logits, correction = random(TOKENS, experts), random(experts, seed=1) if corrected else None
    chosen, share = choose_experts(
        logits, per_token, normalized=False, scoring=scoring, correction=correction, groups=groups,
        groups_chosen=groups_chosen, scale=2.5,
    )  # fmt: skip
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    each = experts // groups
    for row in range(TOKENS):
        rank = (scores[row] + (0 if correction is None else correction)).tolist()
        members = [sorted(rank[start : start + each], reverse=True) for start in range(0, experts, each)]
        worth = [sum(group[: 1 if scoring == "softmax" else 2]) for group in members]
        best = sorted(range(groups), key=lambda group: -worth[group])[:groups_chosen]
        allowed = [number for number in range(experts) if number // each in best]
        wanted = sorted(allowed, key=lambda number: -rank[number])[:per_token]
        assert chosen[row].tolist() == wanted
        torch.testing.assert_close(share[row], 2.5 * scores[row, wanted])


def choose(logits: Tensor, experts: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    routing = experts.routing
    assert routing.corrected == (correction is not None)
    return choose_experts(
        logits, experts.per_token, normalized=routing.normalized, scoring=routing.scoring, correction=correction,
        groups=routing.groups, groups_chosen=routing.groups_chosen, scale=routing.scale,
    )  # fmt: skip


def by_expert(chosen: Tensor, share: Tensor, experts: int) -> Tensor:
    """How much each expert counts, [tokens, experts]: routers name the chosen ones in any order."""
    return torch.zeros(len(chosen), experts).scatter(1, chosen, share)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "normalized"),
    [(name, given) for name in WITH_EXPERTS for given in (True, False) if (name, given) != ("deepseek_v2", True)],
)
def test_routers_of_transformers_choose_the_same(family: str, normalized: bool) -> None:
    """Mixtral and gpt-oss always normalize, DeepSeek-V2 never. The gate of a shared expert is compared too."""
    model = build_model(family, **SETTINGS[family] | {"norm_topk_prob": normalized})
    block = model.model.layers[1].mlp
    x = random(TOKENS, 64)
    router = block.router if family == "gpt_oss" else block.gate
    logits, share, chosen = router(x)
    (experts,) = {stage.experts for stage in FAMILIES[family].stages(1, model.config.to_dict()) if stage.experts}
    assert experts.routing.normalized == (normalized or family in ("mixtral", "gpt_oss"))
    found = choose(logits, experts, getattr(router, "e_score_correction_bias", None))
    torch.testing.assert_close(by_expert(*found, experts.count), by_expert(chosen, share, experts.count))
    if hasattr(block, "shared_expert"):
        routed = block.experts(x, chosen, share)
        whole = add_shared_expert(routed, block.shared_expert(x), block.shared_expert_gate(x))
        torch.testing.assert_close(whole, block(x[None])[0])
    assert torch.equal(add_shared_expert(x, x, None), x + x)
