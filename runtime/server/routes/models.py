"""/v1/models: the models that this server has."""

from __future__ import annotations

from fastapi import APIRouter, Request

from quantkit.runtime.server.errors import documented
from quantkit.runtime.server.models.registry import ModelRegistry, find_model, registry
from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.schemas.responses import Model, ModelList
from quantkit.runtime.server.virtual_models import VirtualModel

router = APIRouter()


@router.get("/v1/models", tags=["OpenAI"], responses=documented(401, 503), response_model_exclude_none=True)
async def list_models(request: Request) -> ModelList:
    """The names under which models are served, those of virtual models last."""
    models = registry(request)
    found = [_model(model, name) for model in models.each for name in model.names]
    return ModelList(object="list", data=[*found, *(_virtual(models, one) for one in models.virtual.values())])


@router.get(
    "/v1/models/{name:path}", tags=["OpenAI"], responses=documented(401, 404, 503), response_model_exclude_none=True
)
async def retrieve_model(name: str, request: Request) -> Model:
    models = registry(request)
    return _virtual(models, models.virtual[name]) if name in models.virtual else _model(*find_model(request, name))


def _model(model: ServedModel, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=model.started,
        owned_by="quantkit",
        max_model_len=model.info.max_context,
    )


def _virtual(models: ModelRegistry, virtual: VirtualModel) -> Model:
    members = models.members_of(virtual)
    return Model(
        id=virtual.name,
        object="model",
        created=max(model.started for model in members),
        owned_by="quantkit",
        max_model_len=max(model.info.max_context for model in members),
        policy=virtual.policy,
        members=[model.names[0] for model in members],
    )
