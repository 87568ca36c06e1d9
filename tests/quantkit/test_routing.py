"""What config.json may say of routers, and what is refused in one line before anything is read."""

from typing import Any

import pytest

from quantkit.arch import FAMILIES
from quantkit.errors import InputError
from quantkit.stages import Routing

GLM = {"model_type": "glm4_moe", "n_routed_experts": 12, "num_experts_per_tok": 4}
V3 = GLM | {"model_type": "deepseek_v3", "n_group": 3, "topk_group": 2}
V2 = GLM | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}


def routing_of(config: dict[str, Any]) -> Routing:
    (experts,) = {stage.experts for stage in FAMILIES[config["model_type"]].stages(5, config) if stage.experts}
    return experts.routing


def test_what_is_read() -> None:
    assert routing_of(GLM) == Routing(True, "sigmoid", True, float32=True)
    assert routing_of(V3) == Routing(True, "sigmoid", True, groups=3, groups_chosen=2, scale=2.5, float32=True)
    assert routing_of(V2) == Routing(False, groups=3, groups_chosen=2, float32=True)
    assert routing_of(V2 | {"topk_method": "greedy", "routed_scaling_factor": 16}) == Routing(
        False, scale=16.0, float32=True
    )
    assert routing_of(V3 | {"norm_topk_prob": False, "scoring_func": "sigmoid"}).normalized is False


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (V3, {"scoring_func": "softmax"}, r"'scoring_func' is 'softmax', but routers of .*'deepseek_v3' know only sig"),
        (V2, {"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'"),
        (GLM, {"topk_method": "greedy"}, "'topk_method' is 'greedy', but .* know only noaux_tc"),
        (V2, {"topk_method": "noaux_tc"}, "know only greedy and group_limited_greedy"),
        (V3, {"n_group": 5}, "'n_group' is 5, which does not divide 12 experts"),
        (V2, {"n_group": 8}, "'n_group' is 8, which does not divide 12 experts"),
        (V3, {"n_group": 12}, "'n_group' is 12, but a group needs 2 of 12 experts"),
        (V3, {"topk_group": 4}, "'topk_group' is 4, but there are 3 groups"),
        (V3, {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, but the groups chosen have 8 experts"),
        (GLM, {"num_experts_per_tok": 13}, "'num_experts_per_tok' is 13, but there are 12 experts"),
        (V2, {"n_group": None}, "'n_group' is None, but must be a positive whole number"),
        (V2, {"norm_topk_prob": True}, "'norm_topk_prob' is true"),
        (V3, {"routed_scaling_factor": "2"}, "'routed_scaling_factor' is '2', but must be a number"),
        (V3, {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        (V3, {"first_k_dense_replace": None}, "'first_k_dense_replace' is None, but must be a whole number from 0"),
        (V3, {"n_shared_experts": 0}, "'n_shared_experts' is 0"),
        (V3, {"qk_rope_head_dim": 7}, "'qk_rope_head_dim' is 7, but numbers turn in pairs"),
        (V3, {"kv_lora_rank": None}, "'kv_lora_rank' is None"),
    ],
    ids=str,
)
def test_what_is_refused(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        routing_of(config | changes)
    assert "\n" not in str(caught.value)


def test_layers_before_the_experts_are_dense() -> None:
    for config, dense in ((GLM, 1), (V3, 3), (V2, 0), (V3 | {"first_k_dense_replace": 2}, 2)):
        family = FAMILIES[config["model_type"]]
        routed = [any(stage.experts for stage in family.stages(layer, config)) for layer in range(5)]
        assert routed == [layer >= dense for layer in range(5)]
