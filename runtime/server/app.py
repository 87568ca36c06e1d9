"""The application: routes, limits and documentation around engines that are ready.

CORS -> LogMiddleware -> AccessMiddleware -> route -> Call -> engine
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.errors import install_error_handlers
from quantkit.runtime.server.gpu_metrics import GpuWatch
from quantkit.runtime.server.middleware.access import AccessMiddleware, is_guarded
from quantkit.runtime.server.middleware.request_log import LogMiddleware
from quantkit.runtime.server.models.registry import ModelRegistry
from quantkit.runtime.server.models.served_model import ServedModel, make_served_model
from quantkit.runtime.server.routes import chat, completions, health, models, tgi, tokenize
from quantkit.runtime.server.routes.page import page_router
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.server.tracing import RequestTraces, open_traces
from quantkit.runtime.server.version import package_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quantkit.runtime.server.shadow import ShadowWatch

_SECONDS_OF_PREFLIGHT = 600


def create_app(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    shadow: ShadowWatch | None = None,
) -> FastAPI:
    """An application for one client that was started."""
    return create_app_of([make_served_model(settings, client, tokenizer, shadow)])


def create_app_of(
    each: Sequence[ServedModel], *, gpus: GpuWatch | None = None, traces: RequestTraces | None = None
) -> FastAPI:
    """An application for several models, whose settings agree on everything but the models."""
    settings = each[0].settings
    if traces is None and settings.otlp_endpoint is not None:
        traces = open_traces(settings.otlp_endpoint)
    registry = ModelRegistry(each, gpus or _watch_gpus(each), traces)
    app = FastAPI(title="quantkit", version=package_version(), docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.models = registry
    app.state.tgi_routes = settings.tgi_routes  # in whose shape errors are
    _add_middleware(app, settings, registry)
    install_error_handlers(app)
    for router in (chat.router, completions.router, models.router, tokenize.router, health.router):
        app.include_router(router)
    if settings.tgi_routes:
        app.include_router(tgi.router)
    if settings.page:
        app.include_router(page_router(registry))
    _document(app, settings)
    return app


def _watch_gpus(each: Sequence[ServedModel]) -> GpuWatch:
    """Those that the engines see; none where all of them compute on a CPU."""
    if any(model.info.device.startswith("cuda") for model in each):
        return GpuWatch(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    return GpuWatch(lambda: None)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    models: ModelRegistry = app.state.models
    models.gpus.start()
    yield
    models.gpus.close()
    for model in models.each:
        model.prompts.close()
    if models.traces is not None:
        await asyncio.to_thread(models.traces.close)


def _add_middleware(app: FastAPI, settings: ServerSettings, registry: ModelRegistry) -> None:
    """The one that is added last stands outermost."""
    app.add_middleware(AccessMiddleware, settings=settings)
    app.add_middleware(LogMiddleware, models=registry)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=_SECONDS_OF_PREFLIGHT,
        )


def _document(app: FastAPI, settings: ServerSettings) -> None:
    """/openapi.json as the server behaves: wrong input is a 400, and keys are asked for where there are some."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _truthful(found, settings)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _truthful(schema: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    parts = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            tgi_route = "TGI" in operation.get("tags", ())
            if not tgi_route:
                operation["responses"].pop("422", None)
            if not is_guarded(path, method.upper(), tgi_route):
                continue
            if settings.api_keys:
                operation["security"] = [{"key": []}]
            else:
                operation["responses"].pop("401", None)
    if settings.api_keys:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return schema
