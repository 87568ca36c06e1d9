"""The page that a browser gets: its files, and the numbers that it shows.

The files are read once, when the router is made, and answered by name from memory: no request reaches the file system.
The page needs no other host; its Content-Security-Policy says so to the browser, and also that no text can become a
script, whatever a model answers.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.version import package_version

if TYPE_CHECKING:
    from quantkit.runtime.server.models.registry import ModelRegistry

PAGE_FOLDER = Path(__file__).parents[1] / "page"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cache-Control": "no-cache",  # a new version of the server shows its own page at once
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_router(models: ModelRegistry) -> APIRouter:
    """Routes of the page, for an application to include."""
    files = {path.name: path.read_bytes() for path in PAGE_FOLDER.iterdir() if path.suffix in _CONTENT_TYPES}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return _file("index.html", files["index.html"])

    @router.get("/page/status")
    async def status(model: str | None = None) -> Response:
        content = _status(models, models.each[0] if model is None else models.find(model)[0])
        return JSONResponse(content, headers=_HEADERS | {"Cache-Control": "no-store"})

    @router.get("/page/{name}")
    async def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file '{name}'")
        return _file(name, files[name])

    return router


def _file(name: str, content: bytes) -> Response:
    return Response(content, media_type=_CONTENT_TYPES[Path(name).suffix], headers=_HEADERS)


def _status(models: ModelRegistry, model: ServedModel) -> dict[str, Any]:
    """What is served (null until that is known), and the newest numbers. No paths: whoever opens the page reads it."""
    live, client = dict(model.metrics.snapshot()), model.client
    name = model.names[0]
    return {
        "info": None if client.info is None else asdict(client.info) | {"model": name},
        "live": live,
        "shadow": live.pop("shadow", None),
        "gpus": models.gpus.snapshot(),
        "ready": client.ready,
        "models": [one.names[0] for one in models.each],
        "version": package_version(),
    }
