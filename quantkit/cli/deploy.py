"""quantkit deploy"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import json_option, print_json, print_table
from quantkit.extras import require
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.deploy.check import Needs
    from quantkit.deploy.config import DeployConfig

_ADDRESS = "HOST:PORT of a Ray cluster's head node, or auto for the one on this machine; default: start one here."
_DRAIN_SECONDS = 30.0  # where no configuration says it


@click.command("deploy", short_help="Serve models on a Ray cluster, in replicas.")
@click.argument("config", required=False, metavar="CONFIG.yaml")
@click.option("--address", metavar="ADDRESS", help=_ADDRESS)
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; start nothing.")
@click.option("--status", "shows_status", is_flag=True, help="Say what is deployed.")
@click.option("--stop", "stops", is_flag=True, help="Let open requests finish, then remove what is deployed.")
@json_option
def command(
    config: str | None, address: str | None, dry_run: bool, shows_status: bool, stops: bool, as_json: bool
) -> None:
    """Serve the models of CONFIG.yaml with OpenAI's API from a Ray cluster.

    \b
    quantkit deploy models.yaml                     a cluster on this machine, until Ctrl-C
    quantkit deploy models.yaml --dry-run           the plan: replicas, devices, memory
    quantkit deploy models.yaml --address auto      a cluster that runs; again: a rolling update
    quantkit deploy --status --address auto
    quantkit deploy --stop --address auto

    Needs the extra `ray`: pip install 'quantkit[ray]'. See docs/reference/deploy.md.
    """
    if shows_status and stops:
        raise click.UsageError("--status and --stop exclude each other")
    if shows_status or stops:
        require("quantkit deploy", "ray")
        _look_or_stop(address or "auto", stops, as_json)
        return
    if config is None:
        raise click.UsageError("no CONFIG.yaml; see docs/reference/deploy.md for its keys")
    from quantkit.deploy.config import read_deploy_config

    wanted = read_deploy_config(config)
    require("quantkit deploy", "ray")
    _deploy(wanted, address, dry_run, as_json)


def _deploy(config: DeployConfig, address: str | None, dry_run: bool, as_json: bool) -> None:
    from quantkit.deploy import cluster

    if address is None:
        nodes = cluster.local_nodes()
    else:
        cluster.connect(address)
        nodes = cluster.cluster_nodes()
    needs = cluster.check_all(config, nodes, remote=address is not None)
    if dry_run:
        _print_plan(config, needs, nodes, as_json)
        return
    stopping = threading.Event()
    if address is None:
        click.echo(f"quantkit: Ray cluster at {cluster.start_local(config)}", err=True)
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray had set handlers of its own
            signal.signal(number, lambda *_: _on_signal(stopping))
    front = config.front_settings
    if front.warning is not None:
        _tell(f"warning: {front.warning}")
    cluster.deploy(config, every_node=address is not None, tell=_tell)
    scheme = "http" if front.tls_certfile is None else "https"
    names = ", ".join(model.name for model in config.models)
    click.echo(f"quantkit serves {names} at {scheme}://{config.http.host}:{config.http.port}")
    if address is None:
        stopping.wait()
        cluster.stop(front.drain_seconds, _tell)


def _on_signal(stopping: threading.Event) -> None:
    """The first asks for a graceful end, the second does not wait for one: Ray's processes follow ours."""
    if stopping.is_set():
        os._exit(1)
    stopping.set()


def _look_or_stop(address: str, stops: bool, as_json: bool) -> None:
    from quantkit.deploy import cluster

    cluster.connect(address)
    if stops:
        cluster.stop(_DRAIN_SECONDS, _tell)
        click.echo("quantkit: stopped")
        return
    found = cluster.status()
    if as_json:
        print_json(found)
        return
    rows = []
    for name, one in found["deployments"].items():
        states = ", ".join(f"{count} {state.lower()}" for state, count in one["replicas"].items())
        open_requests = [engine["running"] + engine["waiting"] for engine in one["engines"]]
        rows.append((name, one["status"], states, ", ".join(map(str, open_requests))))
    columns = ("deployment", "status", "replicas", "answers in each")
    print_table(f"quantkit on Ray: {found['status']}", columns, rows)


def _print_plan(config: DeployConfig, needs: dict[str, Needs], nodes: list[dict[str, float]], as_json: bool) -> None:
    from quantkit.deploy.resources import on_gpu, replica_bundles

    gpus = any(node.get("GPU") for node in nodes)
    plans: list[dict[str, Any]] = []
    for model in config.models:
        found, gpu = needs[model.name], on_gpu(model, gpus)
        plans.append(
            {
                "model": model.name,
                "path": model.path,
                "replicas": [model.replicas.min, model.replicas.max],
                "bundles": replica_bundles(model, gpu),
                "weights_bytes": found.weights,
                "cache_bytes": found.cache,
                "max_context": found.max_context,
            }
        )
    if as_json:
        print_json({"nodes": nodes, "models": plans})
        return
    rows = [
        (
            plan["model"],
            "{}".format(plan["replicas"][0])
            if len(set(plan["replicas"])) == 1
            else "{} to {}".format(*plan["replicas"]),
            " + ".join(", ".join(f"{amount:g} {kind}" for kind, amount in one.items()) for one in plan["bundles"]),
            human_bytes(plan["weights_bytes"]),
            human_bytes(plan["cache_bytes"]),
            plan["max_context"],
        )
        for plan in plans
    ]
    columns = ("model", "replicas", "of one replica", "weights a rank", "cache a rank", "context")
    there = ", ".join(f"{sum(node.get(kind, 0.0) for node in nodes):g} {kind}s" for kind in ("CPU", "GPU"))
    print_table("Plan", columns, rows, f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}: {there}")


def _tell(line: str) -> None:
    click.echo(f"quantkit: {line}", err=True)
