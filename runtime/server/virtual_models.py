"""Virtual models: names that stand for several models, of which a policy chooses one for each request.

    models: {small: org/small, large: org/large}
    virtual_models:
      auto: {policy: cheapest, members: [small, large]}
      helper: {policy: escalate, members: [small, large]}

This is what the file of --config says about them; `models/routing.py` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quantkit.errors import InputError, did_you_mean

Policy = Literal["cheapest", "escalate"]
Order = Literal["weights", "listed"]
EXAMPLE = "`auto: {policy: cheapest, members: [small, large]}`"
_KEYS = ("policy", "members", "order")


@dataclass(frozen=True)
class VirtualModel:
    name: str
    policy: Policy
    members: tuple[str, ...]  # as they are listed
    order: Order  # in which they are asked: the fewest bytes of weights first, or as they are listed


def read_virtual_model(name: str, entry: Any, served: Sequence[str], where: str) -> VirtualModel:
    """What stands under its name; `served` are the models that there are."""
    if not isinstance(entry, dict):
        raise InputError(f"{where} must have a policy and members, such as {EXAMPLE}")
    for key in entry:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key '{key}'; {did_you_mean(str(key), _KEYS)}")
    policy = _one_of(Policy, "policy", entry.get("policy"), where)
    if policy == "escalate" and "order" in entry:
        raise InputError(f"{where}: escalate goes through its members as they are listed; leave 'order' out")
    order = _one_of(Order, "order", entry.get("order", "listed" if policy == "escalate" else "weights"), where)
    return VirtualModel(name, policy, _members(entry.get("members"), served, where), order)


def _one_of(kind: Any, key: str, given: Any, where: str) -> Any:
    allowed = get_args(kind)
    if given not in allowed:
        raise InputError(f"{where}: '{key}' is {given!r}, but must be {' or '.join(allowed)}")
    return given


def _members(given: Any, served: Sequence[str], where: str) -> tuple[str, ...]:
    if not isinstance(given, list) or len(given) < 2 or not all(isinstance(name, str) for name in given):
        raise InputError(f"{where}: 'members' is {given!r}, but must be a list of two models or more")
    for name in given:
        if name not in served:
            raise InputError(f"{where}: there is no model '{name}'; {did_you_mean(name, served)}")
        if given.count(name) > 1:
            raise InputError(f"{where}: 'members' has '{name}' twice; once is enough")
    return tuple(given)
