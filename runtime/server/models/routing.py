"""Which model answers: the one that a request names, or, where that is a virtual one, the first that can.

    cheapest    the members by what a token costs: the fewest bytes of weights first, or as they are listed
    escalate    the members as they are listed, from the one on that the request's field `escalate` asks for

Each is asked in turn as if it had been named, until one takes the request. A member passes on what its context does not
hold with the whole answer, what it has no means for, and everything while its queue is full or its engine down. What
is wrong for every model ends the search at once. So does an engine that dies with the request, which may be the cause.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.responses import Response

from quantkit.runtime.server.engine_process.pending import EngineDied
from quantkit.runtime.server.errors import TOO_LONG, ApiError, CannotAnswer
from quantkit.runtime.server.logs import note_model, noted
from quantkit.runtime.server.metrics import RoutingReason
from quantkit.runtime.server.models.admission import QUEUE_FULL
from quantkit.runtime.server.models.registry import ModelRegistry, find_model, registry
from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.schemas.requests import SharedFields
from quantkit.runtime.server.virtual_models import VirtualModel


@dataclass(frozen=True)
class Attempt:
    """A model that is to answer, and how the request came to it."""

    model: ServedModel
    name: str  # that the answer carries
    virtual: str | None = None  # the name that the client gave, where it is a virtual one
    reason: RoutingReason = "first"
    has_next: bool = False
    arrived: float = field(default_factory=time.monotonic)  # the request, whoever was asked before

    @property
    def asked_for(self) -> str:
        return self.virtual or self.name

    def room_for_answer(self, max_tokens: int | None) -> int:
        """Tokens that the context must hold beside the prompt. Who names a model gets what it has room for."""
        return max_tokens or 1 if self.virtual is not None else 1

    def require(self, able: bool, lack: str) -> None:
        """Looks for another model where this one lacks something. Who names a model gets what it can do."""
        if self.virtual is not None and not able:
            raise CannotAnswer(f"'{self.name}' {lack}")

    def passes_on(self, error: BaseException | None) -> bool:
        return self.has_next and why_passed_on(error) is not None

    def accepted(self) -> None:
        """The model has taken the request."""
        if self.virtual is not None:
            self.model.metrics.request_routed(self.virtual, self.reason)


@dataclass(frozen=True)
class _Refusal:
    model: ServedModel
    error: ApiError | EngineDied
    reason: RoutingReason


async def routed(
    request: Request, body: SharedFields, answer: Callable[[Attempt], Awaitable[Response]]
) -> Response:  # fmt: skip
    """Has a request answered by the model that it names, or by the first of those that the name stands for."""
    models = registry(request)
    virtual = models.virtual.get(body.model or "")
    if virtual is None:
        named = attempt_at(request, body.model)
        _refuse_escalation(models, body, named.name)
        return await answer(named)
    refusals: list[_Refusal] = []
    for attempt in _attempts(models, virtual, body):
        note_model(request.scope, attempt.name)
        try:
            return await answer(replace(attempt, reason=refusals[0].reason) if refusals else attempt)
        except (ApiError, EngineDied) as error:
            reason = why_passed_on(error)
            if reason is None or noted(request.scope).accepted:
                raise
            refusals.append(_Refusal(attempt.model, error, reason))
    raise _verdict(refusals)


def attempt_at(request: Request, name: str | None) -> Attempt:
    """At the model of this name, which is no virtual one; without a name: the only one there is."""
    return Attempt(*find_model(request, name))


def why_passed_on(error: BaseException | None) -> RoutingReason | None:
    """Why another model may answer where this error came up; None where none could."""
    if isinstance(error, EngineDied):
        return "unavailable"
    if isinstance(error, CannotAnswer):
        return "context" if error.code == TOO_LONG else "capability"
    return "busy" if isinstance(error, ApiError) and error.code == QUEUE_FULL else None


def _attempts(models: ModelRegistry, virtual: VirtualModel, body: SharedFields) -> list[Attempt]:
    """In the order in which they are made. `reason` is that of the first; another one has that of its refusal."""
    if body.token_id_field is not None:
        message = f"{body.token_id_field} has token ids, which mean something else to each model of '{virtual.name}'"
        message += f"; send text, or name one of: {', '.join(virtual.members)}"
        raise ApiError(400, message, param=body.token_id_field, code="invalid_value")
    if virtual.policy != "escalate":
        _refuse_escalation(models, body, virtual.name)
    members, steps = models.members_of(virtual), int(body.escalate or 0)
    if steps >= len(members):
        listed = ", ".join(virtual.members)
        message = f"escalate is {steps}, but '{virtual.name}' has {len(members) - 1} after its first: {listed}"
        raise ApiError(400, message, param="escalate", code="invalid_value")
    arrived = time.monotonic()
    reason: RoutingReason = "escalated" if steps else "first"
    return [
        Attempt(model, model.names[0], virtual.name, reason, model is not members[-1], arrived)
        for model in members[steps:]
    ]


def _refuse_escalation(models: ModelRegistry, body: SharedFields, name: str) -> None:
    if body.escalate:
        able = [one.name for one in models.virtual.values() if one.policy == "escalate"]
        message = f"escalate is for virtual models of that policy, which '{name}' is not; this server has "
        raise ApiError(400, message + (", ".join(able) or "none"), param="escalate", code="invalid_value")


def _verdict(refusals: Sequence[_Refusal]) -> ApiError | EngineDied:
    """What a client is told whom nobody answers: that nobody could, or else to try again, or else the last word."""
    longest = max(refusals, key=lambda refusal: refusal.model.info.max_context)
    if longest.reason == "context":
        name = longest.model.names[0]
        return CannotAnswer(f"{longest.error}; of the models asked, '{name}' has the longest", code=TOO_LONG)
    passing = [refusal.error for refusal in refusals if refusal.reason in ("unavailable", "busy")]
    return passing[0] if passing else refusals[-1].error
