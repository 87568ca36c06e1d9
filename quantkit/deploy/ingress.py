"""The front as a Ray Serve deployment, and the replicas as it sees them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import ASGIApp

from quantkit.deploy.forwarding import Forwarded, Part
from quantkit.deploy.front import LOOK_SECONDS, ReplicaGone, front_app
from quantkit.deploy.replica import log_to_stderr
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.middleware.drain import DrainGate
from quantkit.runtime.server.settings import ServerSettings


class RayBackend:
    def __init__(self, handles: Mapping[str, Any]) -> None:
        """`handles`: Ray Serve's handle for each model."""
        self._handles = dict(handles)
        self._asking = {name: handle.options(stream=True, method_name="http") for name, handle in handles.items()}

    async def ask(self, model: str, request: Forwarded) -> AsyncGenerator[Part, None]:
        response = self._asking[model].remote(request)
        try:
            async for part in response:
                yield part
        except RayTaskError:
            raise  # the replica lives, its application failed
        except RayError as error:
            raise ReplicaGone(str(error)) from error
        except BackPressureError:
            message = f"too many requests wait for '{model}'; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from None
        except DeploymentUnavailableError:
            message = f"'{model}' cannot be served at the moment"
            raise ApiError(503, message, code="model_unavailable", headers={"Retry-After": "5"}) from None
        finally:
            response.cancel()  # a client that left must not be computed for; harmless after the end

    async def metrics(self, model: str) -> list[tuple[str, str]]:
        response = self._handles[model].broadcast("metrics")
        found = await response.results_async(timeout_s=LOOK_SECONDS, return_exceptions=True)
        return [one for one in found if not isinstance(one, BaseException)]


class Ingress:
    """What Ray Serve's proxies send all requests to."""

    def __init__(self, settings: ServerSettings, handles: dict[str, Any]) -> None:
        log_to_stderr(settings.log_level)
        self._gate = DrainGate(front_app(settings, tuple(handles), RayBackend(handles)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Asked for by `serve.ingress()`."""
        return self._gate

    async def drain(self) -> int:
        """From now on new requests get 503; the number of open ones."""
        self._gate.draining = True
        return self._gate.inside
