"""How routers choose, read from config.json. What no router of a family does is refused in one line."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.arch.sizes import Config, size
from quantkit.errors import InputError
from quantkit.stages import Routing


@dataclass(frozen=True)
class CorrectedRouting:
    """DeepSeek-V3's: sigmoids, and a bias that takes part in the choice. The fields are what a silent file means."""

    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0

    def read(self, config: Config, experts: int, per_token: int) -> Routing:
        _check_known(config, "scoring_func", ("sigmoid",))
        _check_known(config, "topk_method", ("noaux_tc",))
        groups = size(config, "n_group", default=self.groups)
        chosen = size(config, "topk_group", default=self.groups_chosen)
        _check_groups(experts, per_token, groups, chosen, deciding=2)
        return Routing(
            normalized=bool(config.get("norm_topk_prob", True)),
            scoring="sigmoid",
            corrected=True,
            groups=groups,
            groups_chosen=chosen,
            scale=_scale(config, self.scale),
            float32=True,
        )


@dataclass(frozen=True)
class GreedyRouting:
    """DeepSeek-V2's: a softmax, over all experts or limited to the best groups."""

    def read(self, config: Config, experts: int, per_token: int) -> Routing:
        _check_known(config, "scoring_func", ("softmax",))
        _check_known(config, "topk_method", ("greedy", "group_limited_greedy"))
        if config.get("norm_topk_prob"):
            raise InputError(
                "config.json: 'norm_topk_prob' is true, which transformers and other engines read in different ways "
                f"for model_type '{config.get('model_type')}'; use the engine that the model was made for"
            )
        groups = chosen = 1
        if config.get("topk_method") == "group_limited_greedy":
            groups, chosen = size(config, "n_group"), size(config, "topk_group")
            _check_groups(experts, per_token, groups, chosen, deciding=1)
        scale = _scale(config, 1.0)
        return Routing(normalized=False, groups=groups, groups_chosen=chosen, scale=scale, float32=True)


def _check_known(config: Config, key: str, known: tuple[str, ...]) -> None:
    value = config.get(key)
    if value is not None and value not in known:
        raise InputError(
            f"config.json: '{key}' is {value!r}, but routers of model_type '{config.get('model_type')}' know only "
            f"{' and '.join(known)}; use another engine"
        )


def _check_groups(experts: int, per_token: int, groups: int, chosen: int, deciding: int) -> None:
    """`deciding`: how many experts a group is judged by."""
    if experts % groups:
        raise InputError(f"config.json: 'n_group' is {groups}, which does not divide {experts} experts")
    if chosen > groups:
        raise InputError(f"config.json: 'topk_group' is {chosen}, but there are {groups} groups of experts")
    each = experts // groups
    if groups > 1 and each < deciding:
        raise InputError(f"config.json: 'n_group' is {groups}, but a group needs {deciding} of {experts} experts")
    if per_token > chosen * each:
        raise InputError(
            f"config.json: 'num_experts_per_tok' is {per_token}, but the groups chosen have {chosen * each} experts"
        )


def _scale(config: Config, silent: float) -> float:
    value = config.get("routed_scaling_factor", silent)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InputError(f"config.json: 'routed_scaling_factor' is {value!r}, but must be a number above 0")
    return float(value)
