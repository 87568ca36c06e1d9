"""From a configuration to a Ray Serve application; `quantkit.deploy.app:build` is for `serve deploy` and RayService."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from quantkit.deploy.check import checkpoint_mark
from quantkit.deploy.config import DeployConfig, ModelPlan, fingerprint, parse_config
from quantkit.deploy.ingress import Ingress
from quantkit.deploy.replica import Replica
from quantkit.deploy.resources import on_gpu, replica_bundles
from quantkit.runtime.server.version import package_version

APP_NAME = "quantkit"
FRONT = "front"
FRONT_CPUS = 0.1
_FRONT_REQUESTS = 10_000  # at once for each front; who may ask a model is settled by the model
_START_ATTEMPTS = 3
_SECONDS_AFTER_DRAIN = 5.0  # for the last words of a replica


def build(args: Mapping[str, Any]) -> Any:
    """An application for the keys of docs/reference/deploy.md, given as `args` in a file of Ray Serve."""
    given = {str(key): value for key, value in args.items() if key != "http"}  # Serve's own file has the port
    return build_application(parse_config(given, "args"), gpus=_cluster_gpus())


def build_application(config: DeployConfig, *, gpus: bool, spare: Mapping[str, bool] | None = None) -> Any:
    """`spare`: models for which one more replica than wanted fits, so that an update starts the new one first."""
    spare = spare or {}
    settings = config.front_settings
    models = {model.name: _model(config, model, gpus, spare.get(model.name, False)) for model in config.models}
    front = serve.deployment(serve.ingress()(Ingress)).options(
        name=FRONT,
        num_replicas=config.http.fronts,
        max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": FRONT_CPUS},
        graceful_shutdown_timeout_s=settings.drain_seconds + _SECONDS_AFTER_DRAIN,
        health_check_period_s=config.health_check_seconds,
        max_surge_percent=100,
    )
    keys = [(key.name, key.digest.hex()) for key in settings.api_keys]
    version = fingerprint(package_version(), settings.model_dump(), keys, sorted(models))
    return _versioned(front, version).bind(settings, models)


def _model(config: DeployConfig, model: ModelPlan, gpus: bool, spare: bool) -> Any:
    settings, replicas = config.replica_settings(model), model.replicas
    gpu = on_gpu(model, gpus)
    bundles = replica_bundles(model, gpu)
    options: dict[str, Any] = {
        "name": model.deployment,
        "max_ongoing_requests": _room(model, gpu),
        "max_queued_requests": settings.max_queue * replicas.max,
        "ray_actor_options": {"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0].get("GPU", 0)},
        "health_check_period_s": config.health_check_seconds,
        "graceful_shutdown_timeout_s": config.front_settings.drain_seconds + _SECONDS_AFTER_DRAIN,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": _START_ATTEMPTS,
        "max_surge_percent": math.ceil(100 / replicas.max) if spare else 0,
        "request_router_config": RequestRouterConfig(
            request_router_class="quantkit.deploy.router:PrefixRouter",
            request_router_kwargs={"margin": model.margin},
        ),
    }
    if len(bundles) > 1:
        options |= {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    if replicas.min == replicas.max:
        options["num_replicas"] = replicas.min
    else:
        options["autoscaling_config"] = {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "target_ongoing_requests": replicas.target_queue,
            "upscale_delay_s": replicas.up_seconds,
            "downscale_delay_s": replicas.down_seconds,
            "look_back_period_s": max(1.0, min(replicas.up_seconds, replicas.down_seconds, 30.0)),
            "metrics_interval_s": max(0.5, min(replicas.up_seconds, 10.0) / 2),
        }
    version = fingerprint(
        package_version(), settings.model_dump(), checkpoint_mark(model.path), model.ranks, model.cpus
    )
    return _versioned(serve.deployment(Replica).options(**options), version).bind(settings, model, bundles)


def _versioned(deployment: Any, version: str) -> Any:
    """With a version of our own, Serve replaces only what changed. `serve deploy` overrides it by one for all."""
    return deployment.options(version=version, _internal=True)


def _room(model: ModelPlan, gpu: bool) -> int:
    """Requests that one replica may hold: those that it computes at once and its queue."""
    at_once = model.options.get("max_sequences") or (256 if gpu else 16)
    waiting = model.options.get("max_queue", 256)
    return int(at_once) + int(waiting)


def _cluster_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU"))
