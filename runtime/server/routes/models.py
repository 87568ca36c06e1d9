"""/v1/models: the models that this server has."""

from __future__ import annotations

from fastapi import APIRouter, Request

from quantkit.runtime.server.errors import documented
from quantkit.runtime.server.models.registry import find_model, registry
from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.schemas.responses import Model, ModelList

router = APIRouter()


@router.get("/v1/models", tags=["OpenAI"], responses=documented(401, 503))
async def list_models(request: Request) -> ModelList:
    """The names under which models are served."""
    found = [_model(model, name) for model in registry(request).each for name in model.names]
    return ModelList(object="list", data=found)


@router.get("/v1/models/{name:path}", tags=["OpenAI"], responses=documented(401, 404, 503))
async def retrieve_model(name: str, request: Request) -> Model:
    return _model(*find_model(request, name))


def _model(model: ServedModel, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=model.started,
        owned_by="quantkit",
        max_model_len=model.info.max_context,
    )
