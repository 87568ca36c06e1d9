"""Ray clusters: reach one or start one, put the application there, look at it, take it away."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from quantkit.deploy.app import APP_NAME, FRONT, FRONT_CPUS, build_application
from quantkit.deploy.check import Needs, check_host_memory, check_model
from quantkit.deploy.config import DeployConfig
from quantkit.deploy.resources import check_room, fits_beside, on_gpu
from quantkit.errors import InputError, QuantkitError

AUTH_MODE = "RAY_AUTH_MODE"  # Ray's own: clusters that it starts on a machine ask for the user's token by default
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 75  # longer than the 60 of nginx, as for `quantkit serve`
_POLL_SECONDS = 0.25
_ADDRESS = re.compile(r"(?P<host>[^:/\s]+|\[[^\]]+\]):(?P<port>\d{1,5})")
_CAUSE = re.compile(r"(?:[\w.]*\.)?(?P<kind>\w*(?:Error|Died|Hold)): (?P<text>.+)")


def local_nodes() -> list[dict[str, float]]:
    """This machine as a cluster of one node."""
    import torch

    found = {"CPU": float(len(os.sched_getaffinity(0)))}
    count = torch.cuda.device_count()
    return [found | {"GPU": float(count)} if count else found]


def start_local(config: DeployConfig) -> str:
    """A cluster on this machine that ends with this process; its address, for people."""
    _check_port(config.http.host, config.http.port)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
    guarded = AUTH_MODE not in os.environ
    (node,) = local_nodes()
    with _quiet():
        context = ray.init(
            address="local",
            num_cpus=int(node["CPU"]),
            num_gpus=int(node.get("GPU", 0)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    found = str(context.address_info["address"])
    return f"{found} (other processes join it with {AUTH_MODE}=token)" if guarded else found


def connect(address: str) -> None:
    """Joins a cluster that runs; one line says why it cannot be reached."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # one line says it all
    if address != "auto":
        _check_reachable(address)
    try:
        with _quiet():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = _first_line(error)
        if address == "auto":
            reason = (
                "no Ray cluster runs on this machine; start one with `ray start --head`, or give --address HOST:PORT"
            )
            raise InputError(reason) from error
        hint = "" if AUTH_MODE in os.environ else f"; if it asks for a token, set {AUTH_MODE}=token"
        raise InputError(f"cannot join the Ray cluster at {address}: {reason}{hint}") from error


def _check_reachable(address: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise InputError(f"--address is '{address}', but must be HOST:PORT of the cluster's head node, or auto")
    try:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = _first_line(error)
        raise InputError(f"no Ray cluster answers at {address}: {reason}; is its head node running?") from error
    if os.environ.get("RAY_USE_TLS", "0") == "0":  # Ray would wait for minutes for a port that is something else's
        channel = grpc.insecure_channel(address)
        try:
            grpc.channel_ready_future(channel).result(CONNECT_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise InputError(f"what listens at {address} is no Ray cluster; give the port of its head node") from error
        finally:
            channel.close()


@contextlib.contextmanager
def _one_line_of_ray() -> Iterator[None]:
    """Where Ray gives up, after seconds of its own: one line instead of a page."""
    try:
        yield
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise QuantkitError(f"Ray gave up: {_first_line(error)} (is this machine busy with something else?)") from error


def cluster_nodes() -> list[dict[str, float]]:
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_all(config: DeployConfig, nodes: list[dict[str, float]], *, remote: bool) -> dict[str, Needs]:
    """Everything that can be wrong with models and cluster, before anything starts.

    With `remote`, a node of the cluster looks at the files, because they need not be here.
    """
    gpus = any(node.get("GPU") for node in nodes)
    found: dict[str, Needs] = {}
    for model in config.models:
        gpu = on_gpu(model, gpus)
        found[model.name] = _check_there(config, model.name, gpu) if remote else check_model(config, model, gpu)
    check_room(config.models, _less_front(nodes, config.http.fronts))
    if len(nodes) == 1:
        check_host_memory([(model, found[model.name]) for model in config.models if not on_gpu(model, gpus)])
    return found


def _less_front(nodes: list[dict[str, float]], fronts: int) -> list[dict[str, float]]:
    """What is left for models. Fronts stand wherever there is room; the largest node is the likeliest."""
    largest = max(range(len(nodes)), key=lambda number: nodes[number].get("CPU", 0.0))
    left = [dict(node) for node in nodes]
    left[largest]["CPU"] = left[largest].get("CPU", 0.0) - fronts * FRONT_CPUS
    return left


def _check_there(config: DeployConfig, name: str, gpu: bool) -> Needs:
    """`check_model` on a node of the cluster, one with GPUs where it matters; takes none of them."""
    node = next((node for node in ray.nodes() if node["Alive"] and (not gpu or node["Resources"].get("GPU"))), None)
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    if node is not None:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        options["scheduling_strategy"] = strategy
    if gpu:  # or Ray would hide the GPUs from a task that takes none
        options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    try:
        found = ray.get(ray.remote(_model_task).options(**options).remote(config, name, gpu))
    except ray.exceptions.RayTaskError as error:
        raise QuantkitError(f"the cluster could not look at model '{name}': {_cause(str(error))}") from error
    if isinstance(found, str):
        raise InputError(found)
    assert isinstance(found, Needs)
    return found


def _model_task(config: DeployConfig, name: str, gpu: bool) -> Needs | str:
    model = next(model for model in config.models if model.name == name)
    try:
        return check_model(config, model, gpu)
    except InputError as error:
        return str(error)


@_one_line_of_ray()
def deploy(config: DeployConfig, *, every_node: bool, tell: Callable[[str], None]) -> None:
    """Puts the application on the cluster, or changes the one that is there; returns when all replicas are ready."""
    http = config.front_settings
    options: dict[str, Any] = {"host": http.host, "port": http.port, "keep_alive_timeout_s": KEEP_ALIVE_SECONDS}
    if http.tls_certfile is not None:
        options |= {"ssl_certfile": http.tls_certfile, "ssl_keyfile": http.tls_keyfile}
    nodes = cluster_nodes()
    gpus, free = any(node.get("GPU") for node in nodes), ray.available_resources()
    spare = {model.name: fits_beside(model, on_gpu(model, gpus), free) for model in config.models}
    with _quiet():
        serve.start(proxy_location="EveryNode" if every_node else "HeadOnly", http_options=options)
        _check_same_port(http.host, http.port)
        target = serve.RunTarget(build_application(config, gpus=gpus, spare=spare), name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_running(tell)


def _wait_until_running(tell: Callable[[str], None]) -> None:
    told = ""
    while True:
        app = serve.status().applications.get(APP_NAME)
        if app is None:
            raise QuantkitError("the application was removed while it started")
        states = {name: dict(found.replica_states) for name, found in app.deployments.items()}
        if app.status == "RUNNING":
            return
        if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [found.message for found in app.deployments.values() if found.status != "HEALTHY"]
            raise QuantkitError(f"the deployment failed: {_cause(' '.join([app.message, *messages]))}")
        line = "; ".join(f"{name}: {_in_words(state)}" for name, state in states.items() if name != FRONT)
        if line and line != told:
            told = line
            tell(line)
        time.sleep(_POLL_SECONDS)


@_one_line_of_ray()
def status() -> dict[str, Any]:
    """What is deployed, for people and programs; InputError where nothing is."""
    app = serve.status().applications.get(APP_NAME)
    if app is None:
        raise InputError("quantkit has deployed nothing on this cluster; run: quantkit deploy CONFIG.yaml")
    return {
        "status": str(app.status.value),
        "message": app.message,
        "deployments": {
            name: {
                "status": str(found.status.value),
                "replicas": {str(state): count for state, count in found.replica_states.items()},
                "message": found.message,
                "engines": [] if name == FRONT else _ask_all(name, "describe"),
            }
            for name, found in app.deployments.items()
        },
    }


def _ask_all(deployment: str, method: str) -> list[Any]:
    """What the replicas of a deployment say; those that do not answer in time are left out, and so is a deployment that
    cannot be asked because all of its replicas just died."""
    try:
        asked = serve.get_deployment_handle(deployment, APP_NAME).broadcast(method)
        answers = asked.results(timeout_s=CONNECT_SECONDS, return_exceptions=True)
    except (TimeoutError, RuntimeError, ray.exceptions.RayError, RayServeException):
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]


@_one_line_of_ray()
def stop(drain_seconds: float, tell: Callable[[str], None]) -> None:
    """New requests get 503, open ones finish as far as the time allows, then the application is gone."""
    status()
    with _quiet():
        _drain(drain_seconds, tell)
        serve.delete(APP_NAME)


def _drain(seconds: float, tell: Callable[[str], None]) -> None:
    end, told = time.monotonic() + seconds, False
    while inside := sum(_ask_all(FRONT, "drain")):
        if time.monotonic() > end:
            return
        if not told:
            told = True
            tell(f"waiting for {inside} open requests")
        time.sleep(_POLL_SECONDS)


def _check_port(host: str, port: int) -> None:
    """A port in use is found before a cluster is started for it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        known = {errno.EADDRINUSE: "another process uses it; choose another one under `http:`"}
        raise InputError(
            f"cannot listen on {host} port {port}: {known.get(error.errno or 0, error.strerror)}"
        ) from error


def _check_same_port(host: str, port: int) -> None:
    """Serve keeps the port that it was started with, whatever is asked for later."""
    from ray.serve.context import _get_global_client

    there = _get_global_client().http_config
    if (there.host, there.port) != (host, port):
        raise InputError(
            f"this cluster's Ray Serve listens on {there.host} port {there.port} already; "
            f"write `http: {{host: {there.host}, port: {there.port}}}`, or run `serve shutdown` first"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own lines are for its log; ours say what matters."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield


def _in_words(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {str(state).lower()}" for state, count in sorted(states.items())) or "none"


def _cause(text: str) -> str:
    """The last exception that a traceback names."""
    found = [match["text"] for match in _CAUSE.finditer(text)]
    return found[-1].strip() if found else text.strip().splitlines()[-1] if text.strip() else "see Ray's logs"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
