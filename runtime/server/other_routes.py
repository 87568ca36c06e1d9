"""Routes that answer at once: models, tokens, health, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.calls import Service, package_version
from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from quantkit.runtime.server.protocol_answers import DetokenizedText, Health, Model, ModelList, Tokens, Version

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/v1/models", tags=["OpenAI"], responses=documented(401, 503))
async def list_models(request: Request) -> ModelList:
    """The names under which the model is served."""
    service = _service(request)
    return ModelList(object="list", data=[_model(service, name) for name in service.names])


@router.get("/v1/models/{name:path}", tags=["OpenAI"], responses=documented(401, 404, 503))
async def retrieve_model(name: str, request: Request) -> Model:
    service = _service(request)
    return _model(service, service.check_model(name))


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
    service = _service(request)
    service.check_model(body.model)
    if isinstance(body, TokenizeChat):
        tokens = await service.prompts.encode_chat(body.messages)
    else:
        tokens = await service.prompts.encode(body.prompt, special=body.add_special_tokens is not False)
    return Tokens(tokens=tokens, count=len(tokens), max_model_len=service.info.max_context)


@router.post("/detokenize", tags=["tokens"], responses=documented(400, 401, 404, 408, 413, 429, 503))
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizedText:
    """The text of token ids, special tokens included."""
    service = _service(request)
    service.check_model(body.model)
    outside = [token for token in body.tokens if token >= service.info.vocab]
    if outside:
        message = f"tokens names {outside[0]}, but this model's go from 0 to {service.info.vocab - 1}"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return DetokenizedText(prompt=await service.prompts.decode(body.tokens))


@router.get("/health", tags=["operation"])
async def health() -> Health:
    """Whether the server process lives."""
    return Health(status="ok")


@router.get("/ready", tags=["operation"], responses=documented(503))
async def ready(request: Request) -> Health:
    """Whether requests would be answered: 503 while the engine starts, and while the server drains."""
    if not _service(request).client.ready:
        raise ApiError(503, "the engine is not ready", code="engine_unavailable", headers={"Retry-After": "5"})
    return Health(status="ok")


@router.get("/metrics", tags=["operation"], response_class=Response, responses={
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
})  # fmt: skip
async def metrics(request: Request) -> Response:
    content, media_type = _service(request).metrics.render()
    return Response(content, media_type=media_type)


@router.get("/version", tags=["operation"])
async def version() -> JSONResponse:
    return JSONResponse(Version(version=package_version()).model_dump())
