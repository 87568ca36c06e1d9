"""Commands that serve a checkpoint with vLLM, SGLang and quantkit, and a Kubernetes manifest for `quantkit deploy`.

vLLM and SGLang find the quantization in config.json, and SGLang's documentation asks not to name it once more: so no
command has --quantization. What they need to be told is the dtype, where a layout has kernels for float16 only.
Read from their documentation and sources in November 2026; which checkpoints they load at all, `engines.py` knows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.checkpoint import Checkpoint
from quantkit.engines import Verdict
from quantkit.errors import InputError
from quantkit.formats import Format, dialect_of
from quantkit.inspection import inspect_checkpoint
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.ranks import Ranks, check_parallel
from quantkit.sources import BUNDLED, model_folder
from quantkit.wording import model_name

IMAGE = "quantkit:latest"  # nobody publishes one: build it with `pip install 'quantkit[ray]'` on Ray's own image
RAY_VERSION = "2.60.0"  # of that image
IMPORT_PATH = "quantkit.deploy.app:build"
_PORT = 8000
_MODELS = "/models"  # where the pods see the volume that holds local checkpoints
_NO_FLOAT16 = ("gemma2", "gemma3_text")  # vLLM refuses the dtype for them


@dataclass(frozen=True)
class Target:
    """A checkpoint to serve, and how."""

    given: str  # as the user named it
    folder: Path
    checkpoint: Checkpoint
    verdicts: dict[str, Verdict]  # by engine
    bytes: int
    ranks: Ranks
    max_context: int

    @property
    def path(self) -> str:
        """What other programs understand: bundled models have no name there."""
        return str(self.folder) if self.given in BUNDLED else self.given

    @property
    def name(self) -> str:
        return self.given if self.given in BUNDLED else model_name(self.given)

    @property
    def local(self) -> bool:
        """Whether it lies on this machine, and not on the hub."""
        return self.given in BUNDLED or Path(self.given).exists()

    @property
    def volume_path(self) -> str:
        return Path(self.name).name

    @property
    def formats(self) -> set[Format]:
        return set(self.checkpoint.formats.values())


@dataclass(frozen=True)
class Launch:
    """One engine's command; without a command the remark says why it cannot."""

    engine: str
    command: tuple[str, ...]
    remark: str

    def to_dict(self) -> dict[str, Any]:
        line = shlex.join(self.command) if self.command else None
        return {"engine": self.engine, "command": line, "arguments": list(self.command), "remark": self.remark}

    def lines(self) -> Iterator[str]:
        """As text for a shell."""
        if self.command:
            yield f"# {self.engine}" + (f" ({self.remark})" if self.remark else "")
            yield shlex.join(self.command)
        else:
            yield f"# {self.engine} cannot: {self.remark}"


def read_target(model: str, *, tensor: int = 1, pipeline: int = 1, max_context: int | None = None) -> Target:
    """Reads headers and config only; InputError where the model cannot be cut so, or was not made for the context."""
    folder = model_folder(model)
    found = inspect_checkpoint(folder)
    checkpoint = Checkpoint(folder)
    config = read_model_config(checkpoint.config)
    ranks = Ranks(tensor, pipeline, experts=config.has_experts and tensor > 1)
    check_parallel(config, checkpoint, ranks)
    if max_context is not None and not 1 <= max_context <= config.max_positions:
        raise InputError(f"--max-context is {max_context}, but this model takes 1 to {config.max_positions} tokens")
    verdicts: dict[str, Verdict] = {verdict.engine: verdict for verdict in found.engines}
    return Target(model, folder, checkpoint, verdicts, found.bytes, ranks, max_context or config.max_positions)


def launches(target: Target) -> tuple[Launch, ...]:
    """vLLM, SGLang, quantkit: each with its command, or the reason why there is none."""
    return (
        _launch(target, "vLLM", ("vllm", "serve", target.path), "--max-model-len"),
        _launch(
            target, "SGLang", ("python", "-m", "sglang.launch_server", "--model-path", target.path), "--context-length"
        ),
        _quantkit(target),
    )


def _launch(target: Target, engine: str, start: tuple[str, ...], context: str) -> Launch:
    refusal = _refusal(target, engine)
    if refusal:
        return Launch(engine, (), refusal)
    command = (*start, "--dtype", _dtype(target), context, str(target.max_context))
    sizes = {"--tensor-parallel-size": target.ranks.tensor, "--pipeline-parallel-size": target.ranks.pipeline}
    for flag, size in sizes.items():
        command += (flag, str(size)) if size > 1 else ()
    return Launch(engine, command, target.verdicts[engine].remark)


def _refusal(target: Target, engine: str) -> str:
    verdict = target.verdicts[engine]
    if not verdict.loads:
        return verdict.remark
    formats = target.checkpoint.formats
    if target.ranks.tensor > 1 and formats and not dialect_of(formats).cut_elsewhere:
        return (
            "it does not cut bitsandbytes checkpoints; use --pipeline-parallel "
            f"{target.ranks.world} instead, or another format"
        )
    kind = str(target.checkpoint.config.get("model_type"))
    if engine == "vLLM" and kind in _NO_FLOAT16 and _dtype(target) == "float16":
        return f"it refuses float16 for {kind}, and this layout or model asks for it; convert to compressed-tensors"
    return ""


def _dtype(target: Target) -> str:
    """Of activations: the checkpoint's own, and float16 where the kernels of a layout know nothing else."""
    if any(fmt.only_float16_elsewhere for fmt in target.formats):
        return "float16"
    return target.checkpoint.dtype if target.checkpoint.dtype == "float16" else "bfloat16"


def _quantkit(target: Target) -> Launch:
    command: tuple[str, ...] = ("quantkit", "serve", target.given, "--max-context", str(target.max_context))
    for flag, size in (("--tensor-parallel", target.ranks.tensor), ("--pipeline-parallel", target.ranks.pipeline)):
        command += (flag, str(size)) if size > 1 else ()
    command += ("--expert-parallel",) if target.ranks.experts else ()
    return Launch("quantkit", command, "")


def manifest(target: Target, *, replicas: tuple[int, int] = (1, 2), image: str = IMAGE) -> dict[str, Any]:
    """A RayService of KubeRay that runs `quantkit deploy` with this checkpoint: a pod of workers for each stage."""
    low, high = replicas
    if not 1 <= low <= high:
        raise InputError(f"--replicas is {low},{high}, but must be the fewest and the most of them, such as 1,4")
    stages = target.ranks.pipeline
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": _resource_name(target.name)},
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


def _resource_name(name: str) -> str:
    """Kubernetes takes small letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"quantkit-{plain}"[:40].rstrip("-")


class _Block(str):
    """Text that YAML writes as a block."""


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))
