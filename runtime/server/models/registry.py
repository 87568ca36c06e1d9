"""The models of a server, by the names that clients ask for: who answers, who is down, whose numbers are whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from starlette.requests import Request

from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.gpu_metrics import GpuWatch
from quantkit.runtime.server.logs import note_model
from quantkit.runtime.server.metrics import render_together
from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.tracing import RequestTraces
from quantkit.runtime.server.virtual_models import VirtualModel


class ModelRegistry:
    def __init__(self, each: Sequence[ServedModel], gpus: GpuWatch, traces: RequestTraces | None = None) -> None:
        """Their names must differ. `gpus` are those of all of them, `traces` where their requests are told of."""
        self.each = tuple(each)
        self.gpus, self.traces = gpus, traces
        self._by_name = {name: model for model in each for name in model.names}
        self.virtual = {virtual.name: virtual for virtual in each[0].settings.virtual_models}

    def find(self, name: str | None) -> tuple[ServedModel, str]:
        """Who answers, and the name that the answer carries. Without a name: the only model there is."""
        if name is None and len(self.each) == 1:
            return self.each[0], self.each[0].names[0]
        names = ", ".join([*self._by_name, *self.virtual])
        if name is None:
            message = f"model is missing, and this server has several: {names}"
            raise ApiError(400, message, param="model", code="invalid_value")
        if name in self.virtual:
            listed = ", ".join(self.virtual[name].members)
            message = f"'{name}' stands for several models, and this is about one; name one of: {listed}"
            raise ApiError(400, message, param="model", code="invalid_value")
        if name not in self._by_name:
            message = f"no model '{name[:100]}' here; this server has: {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._by_name[name], name

    def members_of(self, virtual: VirtualModel) -> tuple[ServedModel, ...]:
        """In the order in which they are asked to answer."""
        listed = [self._by_name[name] for name in virtual.members]
        if virtual.order == "weights":
            listed.sort(key=lambda model: model.info.weights_bytes)
        return tuple(listed)

    def answering(self, name: str | None) -> tuple[ServedModel, ...]:
        """Those who may answer under a name; without one, all."""
        if name in self.virtual:
            return self.members_of(self.virtual[name])
        return self.each if name is None else (self.find(name)[0],)

    @property
    def states(self) -> dict[str, Literal["ready", "down"]] | None:
        """Of each model; None where there is one, whose state /ready tells."""
        if len(self.each) == 1:
            return None
        return {model.names[0]: "ready" if model.client.ready else "down" for model in self.each}

    def request_refused(self, status: int, name: str | None = None) -> None:
        """Of several models, a request that named none of them is counted for none."""
        model = self.each[0] if name is None else self._by_name[name]
        model.metrics.request_refused(status, model_known=name is not None or len(self.each) == 1)

    def render(self) -> tuple[bytes, str]:
        """All metrics, for Prometheus, and their content type."""
        return render_together([model.metrics for model in self.each], [self.gpus])


def registry(request: Request) -> ModelRegistry:
    """Of the application that a request is for."""
    models: ModelRegistry = request.app.state.models
    return models


def find_model(request: Request, name: str | None) -> tuple[ServedModel, str]:
    """As `ModelRegistry.find`, for a request whose refusals are then counted for that model."""
    found, shown = registry(request).find(name)
    note_model(request.scope, shown)
    return found, shown
