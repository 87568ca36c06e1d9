"""What every script is asked: a model, the tokens to calibrate with, where the result goes, and how it is rounded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Task:
    """The command line of a script."""

    model: Path
    calibration: Path
    output: Path
    method: str
    bits: int
    group: int
    steps: int | None
    device: str

    @property
    def samples(self) -> list[Tensor]:
        """Token ids, one tensor [tokens] a sequence."""
        from safetensors.torch import load_file

        return list(load_file(self.calibration)["tokens"].long())


def read_task() -> Task:
    parser = argparse.ArgumentParser(description="Quantize MODEL with another project's tool.")
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path, help="safetensors with `tokens` [samples, length]")
    parser.add_argument("output", type=Path)
    parser.add_argument("--method", required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--steps", type=int, help="of learned rounding; default: the tool's own")
    parser.add_argument("--device", default="cpu")
    return Task(**vars(parser.parse_args()))
