"""The application: routes, limits and documentation around engines that are ready.

CORS -> LogMiddleware -> AccessMiddleware -> route -> Call -> engine
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from quantkit.errors import InputError
from quantkit.runtime.server import chat, completions, other_routes
from quantkit.runtime.server.access import GUARDED, AccessMiddleware, Queue
from quantkit.runtime.server.calls import Service, package_version
from quantkit.runtime.server.engine_client import EngineClient
from quantkit.runtime.server.errors import install_error_handlers
from quantkit.runtime.server.logprobs import TokenTexts
from quantkit.runtime.server.metrics import ServerMetrics
from quantkit.runtime.server.page_routes import page_router
from quantkit.runtime.server.prompts import Prompts
from quantkit.runtime.server.request_log import LogMiddleware
from quantkit.runtime.server.services import Services
from quantkit.runtime.server.settings import ServerSettings

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
    return create_app_of([make_service(settings, client, tokenizer, shadow)])


def create_app_of(each: Sequence[Service]) -> FastAPI:
    """An application for several models, whose settings agree on everything but the models."""
    settings, services = each[0].settings, Services(each)
    app = FastAPI(title="quantkit", version=package_version(), docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.services = services
    _add_middleware(app, settings, services)
    install_error_handlers(app)
    for router in (chat.router, completions.router, other_routes.router):
        app.include_router(router)
    if settings.page:
        app.include_router(page_router(services))
    _document(app, settings)
    return app


def make_service(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: PreTrainedTokenizerBase | None,
    shadow: ShadowWatch | None = None,
) -> Service:
    """One model, ready for requests. Without a tokenizer, nothing could become text."""
    if tokenizer is None:
        raise InputError(f"'{settings.model}' has no tokenizer, which a server needs; copy tokenizer.json there")
    assert client.info is not None, "the engine must be ready"
    names = tuple(settings.names)
    metrics = ServerMetrics(
        lambda: client.stats,
        client.info,
        settings.vllm_metric_names,
        model_name=names[0],
        restarts=lambda: client.restarts,
        shadow=lambda: None if shadow is None else asdict(shadow.numbers()),
    )
    queue = Queue(client.info.max_sequences, settings.max_queue)
    return Service(
        settings, client, Prompts(tokenizer), metrics, queue, names, int(time.time()), TokenTexts(tokenizer), shadow
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    for service in app.state.services.each:
        service.prompts.close()


def _add_middleware(app: FastAPI, settings: ServerSettings, services: Services) -> None:
    """The one that is added last stands outermost."""
    app.add_middleware(AccessMiddleware, settings=settings)
    app.add_middleware(LogMiddleware, services=services)
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
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if not path.startswith(GUARDED):
                continue
            if settings.api_keys:
                operation["security"] = [{"key": []}]
            else:
                operation["responses"].pop("401", None)
    if settings.api_keys:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return schema
