"""What replicas ask of a cluster, as arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.deploy.config import ModelPlan
from quantkit.errors import InputError

Bundle = dict[str, float]
_CPU_OF_A_RANK = 0.1  # beside its GPU, for ranks after the first


def on_gpu(model: ModelPlan, gpus: bool) -> bool:
    """Whether its ranks run on GPUs, in a cluster that has some or none."""
    device = model.options.get("device", "auto")
    return device == "cuda" or (device == "auto" and gpus)


def replica_bundles(model: ModelPlan, gpu: bool) -> list[Bundle]:
    """One bundle for each rank; the first is the replica's own."""
    if not gpu:
        return [{"CPU": model.cpus} for _ in range(model.ranks)]
    return [{"CPU": model.cpus if rank == 0 else _CPU_OF_A_RANK, "GPU": 1.0} for rank in range(model.ranks)]


def check_room(models: Sequence[ModelPlan], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuses what can never be placed on these nodes (their resources when nobody uses them)."""
    cpus, gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    needed_cpus = needed_gpus = 0.0
    for model in models:
        gpu = on_gpu(model, gpus > 0)
        bundles = replica_bundles(model, gpu)
        there = gpus if gpu else cpus
        most = len(bundles) if gpu else sum(bundle["CPU"] for bundle in bundles)
        if gpu and gpus == 0:
            raise InputError(f"'{model.name}' wants device cuda, but the cluster has no GPU; use device: cpu or auto")
        if gpu and most > there:
            ranks = f"tensor_parallel {model.tensor_parallel} x pipeline_parallel {model.pipeline_parallel}"
            raise InputError(f"'{model.name}' has {model.ranks} ranks ({ranks}), but the cluster has {there:g} GPUs")
        if most > there:
            raise InputError(
                f"one replica of '{model.name}' needs {most:g} CPUs ({model.ranks} x cpus: {model.cpus:g}), but the "
                f"cluster has {there:g}; lower `cpus`"
            )
        if not any(_holds(node, bundles[0]) for node in nodes):
            raise InputError(f"no node of the cluster has {_words(bundles[0])} for '{model.name}'; lower `cpus`")
        needed_cpus += model.replicas.min * sum(bundle["CPU"] for bundle in bundles)
        needed_gpus += model.replicas.min * (len(bundles) if gpu else 0)
    for kind, needed, there in (("GPUs", needed_gpus, gpus), ("CPUs", needed_cpus, cpus)):
        if needed > there + 1e-9:
            raise InputError(
                f"all replicas together need {needed:g} {kind}, but the cluster has {there:g} for them; "
                f"lower `replicas`{' or `cpus`' if kind == 'CPUs' else ''}"
            )


def fits_beside(model: ModelPlan, gpu: bool, free: Mapping[str, float]) -> bool:
    """Whether one more replica fits into what is free now."""
    bundles = replica_bundles(model, gpu)
    wanted = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    return all(free.get(kind, 0.0) >= amount for kind, amount in wanted.items())


def _holds(node: Mapping[str, float], bundle: Bundle) -> bool:
    return all(node.get(kind, 0.0) >= amount for kind, amount in bundle.items())


def _words(bundle: Bundle) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
