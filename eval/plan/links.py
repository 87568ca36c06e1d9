"""What joins GPUs, and how long they need to tell each other so many bytes.

Bandwidths are those of data sheets, each way and of one GPU. Which share of them collectives reach is an assumption:
0.82 over NVLink is what NCCL's maintainers say of H100 (370 of 450 GB/s, NVIDIA/nccl-tests issue 212); 0.55 over PCIe
is one report of four cards without direct access to each other (35 of 64 GB/s, NVIDIA/nccl issue 1639; eight of them
reached 28). The seconds before a collective moves anything are those that NCCL itself plans with (its tuning table,
ring, low-latency protocol). None of it was measured by us: a bandwidth given as a number is taken as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.eval.plan.gpus import Gpu

_START = 6.6e-6  # seconds that every collective takes, whatever its size


@dataclass(frozen=True)
class Link:
    """One kind of link, the same between all GPUs."""

    name: str
    nominal: float  # bytes a second, each way, of one GPU
    achieved: float  # share of it that is counted with
    hop: float  # seconds from one GPU to the next

    @property
    def bandwidth(self) -> float:
        return self.nominal * self.achieved

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring in which every rank ends with the sum of all: twice around it, in pieces of 1 / ranks."""
        return self._ring(2, size, ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the whole of `size` bytes, of which it had 1 / ranks: once around the ring."""
        return self._ring(1, size, ranks)

    def send(self, size: float) -> float:
        """Seconds from one GPU to another."""
        return _START + self.hop + size / self.bandwidth

    def _ring(self, turns: int, size: float, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        steps = turns * (ranks - 1)
        return _START + steps * self.hop + steps / ranks * size / self.bandwidth

    def describe(self) -> str:
        share = f"{self.achieved:g} of {self.nominal / 1e9:g} GB/s" if self.achieved != 1 else ""
        speed = share or f"{self.nominal / 1e9:g} GB/s"
        return f"{self.name} {speed}, {1e6 * _START:g} us + {1e6 * self.hop:g} us a hop"


_PCIE_HOP = 1.0e-6
LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 450e9, 0.82, 0.6e-6),  # NVLink 4: H100, H200
        Link("pcie", 64e9, 0.55, _PCIE_HOP),  # PCIe 5, 16 lanes
        Link("pcie4", 32e9, 0.55, _PCIE_HOP),  # PCIe 4, 16 lanes
    )
}
DEFAULT_LINKS = "nvlink,pcie"
_NVLINK_3 = Link("nvlink3", 300e9, 0.82, 0.6e-6)  # A100 SXM; the share is that of NVLink 4
_BOARDS = {"a100-40": _NVLINK_3, "a100-80": _NVLINK_3} | dict.fromkeys(("h100", "h200", "b200"), LINKS["nvlink"])


def usual_link(gpu: Gpu) -> Link:
    """Between GPUs of this kind in one machine: NVLink on the boards that have it, else PCIe of their generation."""
    newest = gpu.capability is None or gpu.capability >= (9, 0)
    return _BOARDS.get(gpu.name) or LINKS["pcie" if newest else "pcie4"]


def find_link(text: str) -> Link:
    """A name, GB/s, or GB/s:microseconds of a hop, such as `50:2.7` for a network of 400 Gbit/s."""
    if text in LINKS:
        return LINKS[text]
    speed, _, hop = text.partition(":")
    try:
        bandwidth, seconds = float(speed) * 1e9, float(hop) * 1e-6 if hop else _PCIE_HOP
    except ValueError:
        bandwidth = seconds = math.nan
    if not (0 < bandwidth < math.inf and 0 <= seconds < 1):
        raise InputError(
            f"--link is '{text}', but must be one of {', '.join(LINKS)}, or GB/s each way such as 50, or GB/s:us with "
            "the microseconds of a hop such as 50:2.7"
        )
    return Link(f"{text} GB/s" if not hop else f"{speed} GB/s, {hop} us", bandwidth, 1.0, seconds)
