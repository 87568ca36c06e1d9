"""One measured case, and the CSV file that keeps it with its machine, versions and date."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, StorageError
from quantkit.eval.kernels.cases import Case
from quantkit.eval.kernels.peers import PEERS
from quantkit.eval.kernels.timing import Limits, Times

COLUMNS = (
    *("date", "gpu", "quantkit", "torch", "triton"),
    *("what", "format", "layer", "shape", "m", "dtype", "kernel"),
    *("median_us", "p20_us", "p80_us", "percent_of_limit", "limit", "bandwidth_tb_s", "rate_tflops", "error"),
    *(f"{name}_us" for name in PEERS),
)
FILE = Path("eval") / "results" / "kernels.csv"


@dataclass(frozen=True)
class Measured:
    """`times` is None where the result was wrong; peers that could not take part are missing."""

    case: Case
    explanation: str
    error: float
    times: Times | None
    peers: Mapping[str, Times]

    @property
    def kernel(self) -> str:
        return self.explanation.partition(": ")[0].strip()

    @property
    def wrong(self) -> bool:
        return self.times is None

    def percent(self, limits: Limits) -> float | None:
        if self.times is None:
            return None
        case = self.case
        return limits.percent(case.bytes, case.operations, case.rate_factor, self.times.median)

    def limit(self, limits: Limits) -> str:
        """Which limit binds: memory or compute."""
        return limits.seconds(self.case.bytes, self.case.operations, self.case.rate_factor)[1]

    def ratio(self, peer: str) -> float | None:
        """How many times as long the peer takes."""
        if self.times is None or peer not in self.peers:
            return None
        return self.peers[peer].median / self.times.median

    def to_dict(self, limits: Limits) -> dict[str, Any]:
        case = self.case
        return {
            "what": case.what,
            "format": case.format,
            "layer": case.layer,
            "shape": case.shape,
            "m": case.tokens,
            "dtype": case.dtype,
            "kernel": self.kernel,
            "explanation": self.explanation,
            "wrong": self.wrong,
            "error": self.error if math.isfinite(self.error) else None,
            "microseconds": asdict(self.times) if self.times else None,
            "bytes": case.bytes,
            "operations": case.operations,
            "percent_of_limit": self.percent(limits),
            "limit": self.limit(limits),
            "peers": {name: asdict(times) | {"ratio": self.ratio(name)} for name, times in self.peers.items()},
        }


@dataclass(frozen=True)
class Report:
    """Everything one run found."""

    rows: tuple[Measured, ...]
    limits: Limits
    device: str
    repeat: int
    notes: tuple[str, ...]

    @property
    def wrong(self) -> list[str]:
        return [row.case.name for row in self.rows if row.wrong]

    def to_dict(self) -> dict[str, Any]:
        limits = {"bandwidth_tb_s": self.limits.bandwidth / 1e12, "rate_tflops": self.limits.rate / 1e12}
        return {
            "device": self.device,
            "versions": versions(),
            "repeat": self.repeat,
            "limits": limits,
            "rows": [row.to_dict(self.limits) for row in self.rows],
            "notes": list(self.notes),
        }


def versions() -> dict[str, str]:
    return {name: _version(name) for name in ("quantkit", "torch", "triton")}


def _version(package: str) -> str:
    if package == "torch":  # knows the CUDA version it was built for, which its package does not always say
        import torch

        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class ResultsFile:
    """Rows are appended as they are measured, so that an interrupted run loses nothing."""

    def __init__(self, path: Path, device: str, limits: Limits) -> None:
        self.path = path
        self.fixed = {"date": datetime.date.today().isoformat(), "gpu": device, **versions()}
        self.limits = limits

    def append(self, measured: Measured) -> None:
        """Nothing is kept of a wrong result."""
        if measured.times is None:
            return
        try:
            fresh = not self.path.exists() or self.path.stat().st_size == 0
            with self.path.open("a", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if fresh:
                    writer.writeheader()
                writer.writerow(self.fixed | self._numbers(measured, measured.times))
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}; choose another --output") from error

    def _numbers(self, measured: Measured, times: Times) -> dict[str, Any]:
        case = measured.case
        return {
            "what": case.what,
            "format": case.format,
            "layer": case.layer,
            "shape": case.shape,
            "m": case.tokens,
            "dtype": case.dtype,
            "kernel": measured.kernel,
            "median_us": f"{times.median:.4g}",
            "p20_us": f"{times.p20:.4g}",
            "p80_us": f"{times.p80:.4g}",
            "percent_of_limit": f"{measured.percent(self.limits):.3g}",
            "limit": measured.limit(self.limits),
            "bandwidth_tb_s": f"{self.limits.bandwidth / 1e12:.4g}",
            "rate_tflops": f"{self.limits.rate / 1e12:.4g}",
            "error": f"{measured.error:.2g}",
            **{f"{name}_us": f"{peer.median:.4g}" for name, peer in measured.peers.items()},
        }


def results_path(output: Path | None, save: bool) -> Path | None:
    """Where rows go: --output, else the results of the checkout that this is run in, else nowhere. Checks it first."""
    if not save:
        if output is not None:
            raise InputError("--output names a file and --no-save forbids one; give one of them")
        return None
    path = output or (FILE if _in_checkout() else None)
    if path is not None:
        check_header(path)
    return path


def _in_checkout() -> bool:
    return FILE.parent.is_dir() and Path("pyproject.toml").is_file() and Path("kernels", "reference").is_dir()


def check_header(path: Path) -> None:
    """Refuses a file that rows of today would not fit into."""
    if not path.parent.is_dir():
        raise StorageError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), None)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StorageError(f"cannot read {path}: {error}; choose another --output") from error
    if header is not None and tuple(header) != COLUMNS:
        odd = [name for name in header if name not in COLUMNS] + [name for name in COLUMNS if name not in header]
        raise StorageError(
            f"{path} has other columns than this version writes (differing: {', '.join(odd[:4]) or 'their order'}); "
            "move it away or choose another --output"
        )
