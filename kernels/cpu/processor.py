"""What a CPU can do, as far as kernels depend on it: how long its vectors are, and how it multiplies bytes.

Ways to multiply bytes, four products added to each 32-bit sum:

    sdot      ARM with dot products: signed with signed
    vpdpbusd  x86 with VNNI: unsigned with signed
    pmaddubsw x86 with AVX2: the same in two steps, of which the first saturates where codes have 8 bits
    wide      everywhere: widened, multiplied and added; what LLVM makes of it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llvmlite import binding


@dataclass(frozen=True)
class Processor:
    """`cpu` and `features` as LLVM spells them; `vector` in bytes."""

    triple: str
    cpu: str
    features: str
    vector: int
    dot: str
    multiplies_halves: bool = False  # vectors of float16, without widening them

    @property
    def is_arm(self) -> bool:
        return self.triple.startswith(("aarch64", "arm64"))

    @property
    def multiplies_signed(self) -> bool:
        """Bytes of codes are signed in `dot`; else they are unsigned."""
        return self.dot in ("sdot", "wide")


@cache
def this_processor() -> Processor:
    """The one that runs this process. Features are asked, not inferred from the name: a virtual machine hides some."""
    binding.initialize_native_target()
    triple, cpu = binding.get_process_triple(), binding.get_host_cpu_name()
    features = binding.get_host_cpu_features()
    has = {name for name, there in features.items() if there}
    if triple.startswith(("aarch64", "arm64")):
        has |= _arm_features(triple)
        spelled = features.flatten() + "".join(f",+{name}" for name in sorted(has & set(_LINUX_NAMES)))
        return Processor(triple, cpu, spelled, 16, "sdot" if "dotprod" in has else "wide", "fullfp16" in has)
    return Processor(triple, cpu, features.flatten(), *_x86(has), "avx512fp16" in has)


def _x86(has: set[str]) -> tuple[int, str]:
    if {"avx512vl", "avx512bw"} <= has:
        return 64, "vpdpbusd" if "avx512vnni" in has else "pmaddubsw"
    if "avxvnni" in has:
        return 32, "vpdpbusd"
    return (32, "pmaddubsw") if "avx2" in has else (16, "wide")


_LINUX_NAMES = {"dotprod": "asimddp", "fullfp16": "asimdhp"}


def _arm_features(triple: str) -> set[str]:
    """LLVM does not list these for all that have them; Linux does, and every Apple chip has them."""
    if "darwin" in triple:
        return set(_LINUX_NAMES)
    file = Path("/proc/cpuinfo")
    listed = set(file.read_text(encoding="utf-8").split()) if file.exists() else set()
    return {name for name, spelled in _LINUX_NAMES.items() if spelled in listed}


# Others, so that kernels can be compiled for what is not here.
KNOWN = {
    name: Processor(triple, cpu, features, vector, dot, halves)
    for name, triple, cpu, features, vector, dot, halves in (
        ("x86-64", "x86_64-unknown-linux-gnu", "x86-64", "", 16, "wide", False),
        ("haswell", "x86_64-unknown-linux-gnu", "haswell", "", 32, "pmaddubsw", False),
        ("skylake-avx512", "x86_64-unknown-linux-gnu", "skylake-avx512", "", 64, "pmaddubsw", False),
        ("cascadelake", "x86_64-unknown-linux-gnu", "cascadelake", "", 64, "vpdpbusd", False),
        ("alderlake", "x86_64-unknown-linux-gnu", "alderlake", "", 32, "vpdpbusd", False),
        ("znver4", "x86_64-unknown-linux-gnu", "znver4", "", 64, "vpdpbusd", False),
        ("sapphirerapids", "x86_64-unknown-linux-gnu", "sapphirerapids", "", 64, "vpdpbusd", True),
        ("cortex-a72", "aarch64-unknown-linux-gnu", "cortex-a72", "", 16, "wide", False),
        ("neoverse-n1", "aarch64-unknown-linux-gnu", "neoverse-n1", "", 16, "sdot", True),
        ("apple-m1", "arm64-apple-darwin", "apple-m1", "", 16, "sdot", True),
    )
}
