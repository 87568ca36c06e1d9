"""A Kubernetes manifest for `quantkit deploy`: a RayService of KubeRay with a pod of workers for each stage."""

from __future__ import annotations

import re
from typing import Any

import yaml

from quantkit.errors import InputError
from quantkit.launch.target import Target

IMAGE = "quantkit:latest"  # nobody publishes one: build it with `pip install 'quantkit[ray]'` on Ray's own image
RAY_VERSION = "2.60.0"  # of that image
IMPORT_PATH = "quantkit.deploy.app:build"
_PORT = 8000
_MODELS = "/models"  # where the pods see the volume that holds local checkpoints


def manifest(target: Target, *, replicas: tuple[int, int] = (1, 2), image: str = IMAGE) -> dict[str, Any]:
    """A RayService of KubeRay that runs `quantkit deploy` with this checkpoint: a pod of workers for each stage."""
    low, high = replicas
    if not 1 <= low <= high:
        raise InputError(f"--replicas is {low},{high}, but must be the fewest and the most of them, such as 1,4")
    stages = target.ranks.pipeline
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": f"quantkit-{resource_name(target.name)}"[:40].rstrip("-")},
        "spec": {
            "serveConfigV2": _Block(yaml.safe_dump(_serve_config(target, replicas), sort_keys=False)),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "enableInTreeAutoscaling": True,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # models run in workers
                    "template": _pod("ray-head", image, _resources(2, 8, 0), target, ports=_HEAD_PORTS),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "gpus",
                        "replicas": low * stages,
                        "minReplicas": low * stages,
                        "maxReplicas": high * stages,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", image, _worker_resources(target), target),
                    }
                ],
            },
        },
    }


def manifest_text(target: Target, made: dict[str, Any]) -> str:
    """As YAML, with what must be there first as comments."""
    name = made["metadata"]["name"]
    notes = [
        f"Needs KubeRay's operator, and an image with quantkit[ray] on Ray {RAY_VERSION}. The OpenAI endpoint is the",
        f"service {name}-serve-svc, port {_PORT}, once `kubectl get rayservice {name}` says that it is running.",
    ]
    if target.local:
        notes.append(f"Copy {target.path} to /{target.volume_path} on the volume of the claim `models` first.")
    else:
        notes.append(
            "Pods fetch the model from the hub; a token, if it needs one, is `token` in the secret `huggingface`."
        )
    comments = "".join(f"# {note}\n" for note in notes)
    return comments + yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=120)


def deploy_config(target: Target, replicas: tuple[int, int], path: str) -> dict[str, Any]:
    """What `quantkit deploy` reads, for this one model."""
    return {
        "models": [
            {
                "name": target.name,
                "path": path,
                "tensor_parallel": target.ranks.tensor,
                **({"expert_parallel": True} if target.ranks.experts else {}),
                "pipeline_parallel": target.ranks.pipeline,
                "replicas": {"min": replicas[0], "max": replicas[1]},
                # Serve may build the application before a pod with GPUs is there: `auto` would take the CPU.
                "options": {"device": "cuda", "max_context": target.max_context},
            }
        ]
    }


def _serve_config(target: Target, replicas: tuple[int, int]) -> dict[str, Any]:
    path = f"{_MODELS}/{target.volume_path}" if target.local else target.path
    application = {
        "name": "quantkit",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": deploy_config(target, replicas, path),
    }
    return {"http_options": {"host": "0.0.0.0", "port": _PORT}, "applications": [application]}


_HEAD_PORTS = (("gcs", 6379), ("dashboard", 8265), ("serve", _PORT))


def _pod(
    name: str, image: str, resources: dict[str, Any], target: Target, ports: tuple[tuple[str, int], ...] = ()
) -> dict[str, Any]:
    # Ranks on one node talk through shared memory, of which a container has next to none by itself.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if target.local:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": "models"}})
        mounts.append({"name": "models", "mountPath": _MODELS, "readOnly": True})
    container: dict[str, Any] = {"name": name, "image": image, "resources": resources, "volumeMounts": mounts}
    if not target.local:
        secret = {"name": "huggingface", "key": "token", "optional": True}
        container["env"] = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}]
    if ports:
        container["ports"] = [{"name": port, "containerPort": number} for port, number in ports]
    return {"spec": {"containers": [container], "volumes": volumes}}


def _worker_resources(target: Target) -> dict[str, Any]:
    """A pod has the GPUs of one stage, four CPUs for each, and memory for one and a half of its weights."""
    gpus = target.ranks.tensor
    weights = 1.5 * target.bytes / target.ranks.pipeline / (1 << 30)
    return _resources(4 * gpus, max(16, int(weights) + 8), gpus)


def _resources(cpus: int, gibibytes: int, gpus: int) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(cpus), "memory": f"{gibibytes}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def resource_name(name: str) -> str:
    """Small letters, digits and dashes, as Kubernetes and Ollama take them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class _Block(str):
    """Text that YAML writes as a block."""


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))
