"""GPUs by what their data sheets promise. Nothing here is measured.

Memory is the figure of the data sheet taken as decimal gigabytes, which is on the safe side: the H200 that was measured
has at least 149 GB, not 141. Rates are those of dense matrices with sums in 32 bits, operations a second; where a data
sheet gives the rate with sparsity only, half of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from quantkit.kernels.card import Card

DEFAULT_GPU = "h200"  # where none is named and none is here


@dataclass(frozen=True)
class Gpu:
    """One GPU. A rate of None: it has no units for that, and such products run in 16 bit."""

    name: str  # on the command line
    title: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    bf16: float
    fp8: float | None
    int8: float | None
    capability: tuple[int, int] | None  # of its instructions; None: not NVIDIA's
    processors: int
    reported: tuple[str, ...] = ()  # how the driver calls it
    source: str = "data sheet"
    watts: int | None = None  # that the data sheet lets the board draw (TDP); its host and its cooling are not counted

    def rate(self, arithmetic: str) -> float:
        """Operations a second in `bf16`, `fp8` or `int8`."""
        rates = {"bf16": self.bf16, "fp8": self.fp8, "int8": self.int8}
        return rates[arithmetic] or self.bf16


def _gpu(
    name: str,
    title: str,
    capability: tuple[int, int] | None,
    processors: int,
    watts: int,
    gigabytes: float,
    gigabytes_per_second: float,
    teraflops: tuple[float, float | None, float | None],
    *reported: str,
) -> Gpu:
    bf16, fp8, int8 = (None if rate is None else rate * 1e12 for rate in teraflops)
    assert bf16 is not None
    size, bandwidth = int(gigabytes * 1e9), gigabytes_per_second * 1e9
    return Gpu(name, title, size, bandwidth, bf16, fp8, int8, capability, processors, reported, watts=watts)


_A100_40 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")
GPUS = {
    gpu.name: gpu
    for gpu in (
        # compute capability, multiprocessors, TDP in W, memory GB, bandwidth GB/s, (bf16, fp8, int8) in 10^12 a second
        _gpu("rtx3090", "RTX 3090", (8, 6), 82, 350, 24, 936, (71, None, 284), "NVIDIA GeForce RTX 3090"),
        _gpu("rtx4090", "RTX 4090", (8, 9), 128, 450, 24, 1008, (165.2, 330.3, 660.6), "NVIDIA GeForce RTX 4090"),
        _gpu("rtx5090", "RTX 5090", (12, 0), 170, 575, 32, 1792, (209.5, 419, 838), "NVIDIA GeForce RTX 5090"),
        _gpu("a10", "A10", (8, 6), 72, 150, 24, 600, (125, None, 250), "NVIDIA A10"),
        _gpu("l4", "L4", (8, 9), 58, 72, 24, 300, (121, 242.5, 242.5), "NVIDIA L4"),
        _gpu("a6000", "RTX A6000", (8, 6), 84, 300, 48, 768, (154.8, None, 309.7), "NVIDIA RTX A6000"),
        _gpu("l40s", "L40S", (8, 9), 142, 350, 48, 864, (362, 733, 733), "NVIDIA L40S"),
        _gpu("a100-40", "A100 40 GB", (8, 0), 108, 400, 40, 1555, (312, None, 624), *_A100_40),
        _gpu("a100-80", "A100 80 GB SXM", (8, 0), 108, 400, 80, 2039, (312, None, 624), "NVIDIA A100-SXM4-80GB"),
        _gpu("a100-80-pcie", "A100 80 GB PCIe", (8, 0), 108, 300, 80, 1935, (312, None, 624), "NVIDIA A100 80GB PCIe"),
        _gpu("h100-pcie", "H100 PCIe", (9, 0), 114, 350, 80, 2000, (756.5, 1513, 1513), "NVIDIA H100 PCIe"),
        _gpu("h100", "H100 SXM", (9, 0), 132, 700, 80, 3350, (989.5, 1979, 1979), "NVIDIA H100 80GB HBM3"),
        _gpu("h100-nvl", "H100 NVL", (9, 0), 132, 400, 94, 3900, (835.5, 1671, 1671), "NVIDIA H100 NVL"),
        _gpu("h200", "H200", (9, 0), 132, 700, 141, 4800, (989.5, 1979, 1979), "NVIDIA H200"),
        _gpu("b200", "B200", (10, 0), 148, 1000, 180, 8000, (2250, 4500, 4500), "NVIDIA B200"),
        _gpu("mi300x", "MI300X", None, 304, 750, 192, 5300, (1307.4, 2614.9, 2614.9), "AMD Instinct MI300X"),
    )
}
UNTRIED = {"mi300x": "quantkit's runtime was never run on an MI300X; its figures are the data sheet's arithmetic"}


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, whatever its case and with spaces for dashes."""
    plain = _plain(name)
    if plain not in GPUS:
        raise InputError(f"unknown GPU '{name}'; {did_you_mean(plain, GPUS)}")
    return GPUS[plain]


def find_card(name: str) -> Card:
    """The same as kernels see it, also one that is too old for them. Refuses GPUs that are not NVIDIA's."""
    from quantkit.kernels.card import TOO_OLD, absent_card  # brings torch, which a plan does without

    if _plain(name) in TOO_OLD:
        return TOO_OLD[_plain(name)]
    gpu = find_gpu(name)
    if gpu.capability is None:
        raise InputError(
            f"the {gpu.title} has no kernels: quantkit's are compiled for NVIDIA only; see docs/reference/amd.md"
        )
    return absent_card(gpu.reported[0], gpu.capability, gpu.processors, gpu.bandwidth)


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "-")


def present_gpu() -> tuple[Gpu | None, str]:
    """The GPU of this machine with the memory that it reports, and its name; (None, name) where it is not known."""
    import torch

    if not torch.cuda.is_available():
        return None, ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return recognise(properties.name, properties.total_memory), properties.name


def recognise(reported: str, memory: int) -> Gpu | None:
    """The GPU that a driver calls so, with the memory that it reports."""
    known = next((gpu for gpu in GPUS.values() if reported in gpu.reported), None)
    source = "memory as the driver reports it, the rest from the data sheet"
    return None if known is None else replace(known, memory=memory, source=source)
