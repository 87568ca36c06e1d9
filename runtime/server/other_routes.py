"""Routes that answer at once: models, tokens, health, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.calls import Service, package_version
from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from quantkit.runtime.server.protocol_answers import DetokenizedText, Health, Model, ModelList, Tokens, Version
from quantkit.runtime.server.services import Services, service_for

router = APIRouter()


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


@router.get("/v1/models", tags=["OpenAI"], responses=documented(401, 503))
async def list_models(request: Request) -> ModelList:
    """The names under which models are served."""
    found = [_model(service, name) for service in _services(request).each for name in service.names]
    return ModelList(object="list", data=found)


@router.get("/v1/models/{name:path}", tags=["OpenAI"], responses=documented(401, 404, 503))
async def retrieve_model(name: str, request: Request) -> Model:
    return _model(*service_for(request, name))


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=service.started,
        owned_by="quantkit",
        max_model_len=service.info.max_context,
    )


@router.post("/tokenize", tags=["tokens"], responses=documented(400, 401, 404, 408, 413, 429, 503))
async def tokenize(body: TokenizeText | TokenizeChat, request: Request) -> Tokens:
    """Token ids of a text, or of a conversation as the model sees it."""
    service, _ = service_for(request, body.model)
    if isinstance(body, TokenizeChat):
        tokens = await service.prompts.encode_chat(body.messages)
    else:
        tokens = await service.prompts.encode(body.prompt, special=body.add_special_tokens is not False)
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=service.info.max_context)


@router.post("/detokenize", tags=["tokens"], responses=documented(400, 401, 404, 408, 413, 429, 503))
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizedText:
    """The text of token ids, special tokens included."""
    service, _ = service_for(request, body.model)
    outside = [token for token in body.tokens if token >= service.info.vocab]
    if outside:
        message = f"tokens names {outside[0]}, but this model's go from 0 to {service.info.vocab - 1}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return DetokenizedText(prompt=await service.prompts.decode(body.tokens))


@router.get("/health", tags=["operation"], response_model_exclude_none=True)
async def health(request: Request) -> Health:
    """Whether the server process lives; where it has several models, also which of them are ready."""
    return Health(status="ok", models=_services(request).states)


@router.get("/ready", tags=["operation"], responses=documented(404, 503), response_model_exclude_none=True)
async def ready(request: Request, model: str | None = None) -> Health:
    """Whether requests would be answered: 503 while the engine starts, and while the server drains.

    Of several models it is enough that one is ready; `?model=NAME` asks for that one.
    """
    services = _services(request)
    asked = services.each if model is None else [services.find(model)[0]]
    if not any(service.client.ready for service in asked):
        raise ApiError(503, "the engine is not ready", code="engine_unavailable", headers={"Retry-After": "5"})
    return Health(status="ok", models=services.states)


@router.get("/metrics", tags=["operation"], response_class=Response, responses={
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
})  # fmt: skip
async def metrics(request: Request) -> Response:
    content, media_type = _services(request).render()
    return Response(content, media_type=media_type)


@router.get("/version", tags=["operation"])
async def version() -> JSONResponse:
    return JSONResponse(Version(version=package_version()).model_dump())
