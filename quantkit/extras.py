"""Packages that only some commands need: `pip install 'quantkit[serve]'` brings those of `serve`.

Without them a command ends in one line that names what is missing and what to type.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from quantkit.errors import InputError

# Extra -> what its packages are imported as; pyproject.toml has their versions.
EXTRAS: dict[str, tuple[str, ...]] = {
    "serve": ("fastapi", "starlette", "uvicorn", "prometheus_client", "llguidance", "jsonschema", "referencing"),
    "report": ("matplotlib",),
    "gguf": ("gguf",),
    "calibration": ("datasets",),
    "ray": ("ray", "grpc"),
    "traces": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "tasks": ("lm_eval", "accelerate", "datasets"),
}


def require(what: str, extra: str, *packages: str) -> None:
    """Refuses `what` where packages are missing: those that are named, else all of the extra."""
    assert set(packages) <= set(EXTRAS[extra]), f"{packages} are not all of the extra '{extra}'"
    missing = [package for package in packages or EXTRAS[extra] if not _is_installed(package)]
    if missing:
        raise InputError(f"{what} needs {', '.join(missing)}; pip install 'quantkit[{extra}]'")


def _is_installed(package: str) -> bool:
    try:
        return sys.modules.get(package) is not None or find_spec(package) is not None
    except ModuleNotFoundError:  # nor is what it is a part of
        return False
