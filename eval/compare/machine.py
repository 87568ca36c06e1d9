"""The machine that measures, in words."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from quantkit.eval.compare.results import Machine

_PACKAGES = ("quantkit", "torch", "triton", "transformers", "safetensors", "numpy")


def describe_machine(device: str) -> Machine:
    if device == "cpu":
        name, memory = _processor(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        properties = torch.cuda.get_device_properties(torch.device(device))
        name, memory = properties.name, properties.total_memory
    return Machine(name, device != "cpu", len(os.sched_getaffinity(0)), memory, _software())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


def _software() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout, or not needed here
            continue
    return found | {"torch": str(torch.__version__)}  # knows the CUDA version that it was built for
