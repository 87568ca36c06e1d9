"""Everything that can go wrong with a request, in the shape that OpenAI's clients understand.

    {"error": {"message": ..., "type": ..., "param": the field at fault or null, "code": a word or null}}
    {"error": message, "error_type": a word}        on TGI's routes, as its clients understand it

A handler raises `ApiError`, or lets an error of quantkit through; `as_api_error` says what a client gets for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from quantkit.errors import InputError, QuantkitError
from quantkit.runtime.server.engine_process.pending import EngineDied

TOO_LONG = "context_length_exceeded"  # the code of a request that a context does not hold

_log = logging.getLogger("quantkit.server")
_FIELD_FIRST = re.compile(r"([a-z_]+)(\[\S+\])? (is|names|must) ")  # "top_p is 3, but must be ..."
_IN_A_FIELD = re.compile(r"a token id in ([a-z_]+) ")
_NAME = re.compile(r"[a-z_]+")
_KINDS = ("str", "int", "float", "bool", "text", "json_object", "system", "developer", "user", "assistant", "tool")
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
          404: "invalid_request_error", 405: "invalid_request_error", 408: "timeout_error",
          413: "invalid_request_error", 429: "rate_limit_error", 503: "server_error", 504: "timeout_error"}  # fmt: skip


_TGI_ROUTES = ("/generate", "/generate_stream", "/info")
_TGI_STATUS = {400: 422}  # what is wrong with a request
_TGI_TYPES = {400: "validation", 401: "authentication", 404: "not_found", 413: "validation", 429: "overloaded",
              500: "generation", 503: "healthcheck"}  # fmt: skip


def is_tgi(path: str, method: str) -> bool:
    """Whether TGI has such a route. GET / is the page."""
    return path in _TGI_ROUTES or (path == "/" and method == "POST")


def _speaks_tgi(scope: Scope) -> bool:
    """Whether a request is for one of TGI's routes, and this server has them."""
    app = scope.get("app")
    return app is not None and getattr(app.state, "tgi_routes", False) and is_tgi(scope["path"], scope["method"])


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


class TgiError(BaseModel):
    """The same on TGI's routes."""

    error: str
    error_type: str


class ApiError(Exception):
    """An answer with a status of 400 or more."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, scope: Scope) -> dict[str, Any]:
        """In the shape that the clients of this route understand."""
        if not _speaks_tgi(scope):
            return self.body
        return {"error": str(self), "error_type": _TGI_TYPES.get(self.status, "incomplete_generation")}

    def response(self, scope: Scope) -> JSONResponse:
        status = _TGI_STATUS.get(self.status, self.status) if _speaks_tgi(scope) else self.status
        return JSONResponse(self.body_for(scope), status, headers=self.headers)


class CannotAnswer(ApiError):
    """The request is too much for this model, but perhaps not for another one."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told. An error that nobody foresaw stays in the log: its text may name paths or prompts."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        param = getattr(error, "param", None) or _named_field(str(error))
        return ApiError(400, str(error), param=param, code="invalid_value")
    if isinstance(error, EngineDied):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    if isinstance(error, QuantkitError):
        return ApiError(500, str(error), code="internal_error")
    _log.error("unexpected error", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why", code="internal_error")


def _named_field(message: str) -> str | None:
    """`top_p` of "top_p is 3, but must be ..."."""
    found = _FIELD_FIRST.match(message) or _IN_A_FIELD.match(message)
    return found[1] if found else None


def field_path(location: Sequence[int | str]) -> str | None:
    """`messages[0].name` of ("body", "messages", 0, "user", "name"): names of types and roles are no part of it."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        elif _NAME.fullmatch(part) and not (path and part in _KINDS):
            path += f".{part}" if path else part
    return path or None


def invalid_request(error: RequestValidationError) -> ApiError:
    """What pydantic found, as one sentence about the first field that is wrong."""
    found = list(error.errors())
    first = min(found, key=lambda one: one["type"] == "extra_forbidden") if found else {}
    path = field_path(first.get("loc", ()))
    if first.get("type") == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json")
    if path is None and isinstance(first.get("input"), bytes):
        return ApiError(400, "the body must be JSON with 'Content-Type: application/json'", code="invalid_json")
    if path is None and first.get("type") == "missing":
        return ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    reasons = {str(one["msg"]).removeprefix("Value error, ") for one in found if field_path(one["loc"]) == path}
    sentence = " or ".join(sorted(reasons)[:4])
    return ApiError(400, f"{path or 'the body'}: {sentence}", param=path, code="invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error of this application the shape above."""

    async def own(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.scope)

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return invalid_request(error).response(request.scope)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404 and message == "Not Found":
            message = f"no such route: {request.method} {request.url.path}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, message, code=code, headers=error.headers).response(request.scope)

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(QuantkitError, own)
    app.add_exception_handler(TimeoutError, own)
    app.add_exception_handler(Exception, own)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)


def documented(*statuses: int, tgi: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that may give these."""
    words = {400: "A field is wrong", 401: "The API key is missing or wrong", 404: "No such model",
             408: "The body came too slowly", 413: "The body is too large", 422: "A field is wrong",
             429: "Too many requests; see Retry-After",
             500: "The server failed", 503: "The engine is not ready", 504: "The time limit was reached"}  # fmt: skip
    body = TgiError if tgi else ErrorBody
    return {status: {"model": body, "description": words[status]} for status in statuses}
