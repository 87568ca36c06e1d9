"""What operators ask: /health, /ready, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.errors import ApiError, documented
from quantkit.runtime.server.models.registry import registry
from quantkit.runtime.server.schemas.responses import Health, Ready, Version
from quantkit.runtime.server.version import package_version

router = APIRouter()


@router.get("/health", tags=["operation"], response_model_exclude_none=True)
async def health(request: Request) -> Health:
    """Whether the server process lives; where it has several models, also which of them are ready."""
    return Health(status="ok", models=registry(request).states)


@router.get("/ready", tags=["operation"], responses=documented(404, 503), response_model_exclude_none=True)
async def ready(request: Request, model: str | None = None) -> Ready:
    """Whether requests would be answered: 503 while the engine starts, and while the server drains.

    While kernels and graphs are still prepared between requests (`--warm-up background`), `rehearsing` says what comes
    next, and `left` how many parts there are: a request whose size was not rehearsed may wait for it.

    Of several models it is enough that one is ready; `?model=NAME` asks for that one, or for those that it stands for.
    """
    models = registry(request)
    asked = models.answering(model)
    if not any(one.client.ready for one in asked):
        reason = "; ".join(f"{one.names[0]}: {one.client.why_not_ready}" for one in asked)
        raise ApiError(503, reason, code="engine_unavailable", headers={"Retry-After": "5"})
    stats = [one.client.stats for one in asked if one.client.ready]
    left = sum(one.rehearsal_left for one in stats)
    rehearsing = next((one.rehearsing for one in stats if one.rehearsing), None)
    return Ready(status="ready", models=models.states, rehearsing=rehearsing, left=left or None)


@router.get("/metrics", tags=["operation"], response_class=Response, responses={
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}
})  # fmt: skip
async def metrics(request: Request) -> Response:
    content, media_type = registry(request).render()
    return Response(content, media_type=media_type)


@router.get("/version", tags=["operation"])
async def version() -> JSONResponse:
    return JSONResponse(Version(version=package_version()).model_dump())
