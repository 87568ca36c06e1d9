"""What operators ask: /health, /ready, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.models.registry import registry
from quantkit.runtime.server.schemas.responses import Health, Version
from quantkit.runtime.server.version import package_version

router = APIRouter()


@router.get("/health", tags=["operation"], response_model_exclude_none=True)
async def health(request: Request) -> Health:
    """Whether the server process lives; where it has several models, also which of them are ready."""
    return Health(status="ok", models=registry(request).states)


@router.get("/ready", tags=["operation"], responses=documented(404, 503), response_model_exclude_none=True)
async def ready(request: Request, model: str | None = None) -> Health:
    """Whether requests would be answered: 503 while the engine starts, and while the server drains.

    Of several models it is enough that one is ready; `?model=NAME` asks for that one, or for those that it stands for.
    """
    models = registry(request)
    asked = models.answering(model)
    if not any(one.client.ready for one in asked):
        reason = "; ".join(f"{one.names[0]}: {one.client.why_not_ready}" for one in asked)
        raise ApiError(503, reason, code="engine_unavailable", headers={"Retry-After": "5"})
    return Health(status="ok", models=models.states)


@router.get("/metrics", tags=["operation"], response_class=Response, responses={
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
})  # fmt: skip
async def metrics(request: Request) -> Response:
    content, media_type = registry(request).render()
    return Response(content, media_type=media_type)


@router.get("/version", tags=["operation"])
async def version() -> JSONResponse:
    return JSONResponse(Version(version=package_version()).model_dump())
