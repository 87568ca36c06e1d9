"""The gate before the application, which closes when the server is about to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.runtime.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

RETRY_AFTER_SECONDS = 5
_WATCHED = ("/", "/health", "/metrics")  # who looks on is answered to the end, and waited for by nobody


class DrainGate:
    """Stands before the application: counts the requests inside, and lets none in after `draining` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.inside = 0
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _watches(scope):
            await self._app(scope, receive, send)
        elif self.draining:
            await self._refuse(scope, receive, send)
        else:
            self.inside += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self.inside -= 1

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Also the answer of /ready: nothing should be sent here any more."""
        models = getattr(getattr(self._app, "state", None), "models", None)
        if models is not None and scope["method"] == "POST":
            models.request_refused(503)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"}
        error = ApiError(503, "the server is shutting down; ask another one", code="draining", headers=headers)
        await error.response(scope)(scope, receive, send)


def _watches(scope: Scope) -> bool:
    """POST / is a request of TGI's clients."""
    path = scope["path"]
    return path.startswith("/page/") or (path in _WATCHED and scope["method"] != "POST")
