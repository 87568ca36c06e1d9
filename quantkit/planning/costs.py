"""What a run costs before it starts: memory from the sizes of the layers, time from a short measurement of the device.

Both are estimates. Memory follows what the passes keep at the same time; time counts the products of matrices,
what the method says of its own work, and the weights that a format rounds and stores.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from quantkit.formats import Format, Shape
from quantkit.formats.base import DTYPES
from quantkit.methods import Method
from quantkit.methods.costing import COPIES, GroupWork, Speed
from quantkit.methods.statistics import SAMPLE
from quantkit.passes.activations import choose_place
from quantkit.passes.calibrated import KEPT_INNER_BYTES
from quantkit.passes.experts import expert_bytes
from quantkit.passes.sensitivity import FITTED_TOKENS, LENGTH, SCORED
from quantkit.touch_up.learning import BATCH
from quantkit.working_memory import BATCH_TOKENS, batch_tokens, how_many_together

PROCESS_BYTES = 400_000_000  # Python with torch and transformers
CUDA_BYTES = 600_000_000  # what a process holds on a GPU before its first tensor, and workspaces
DISK_RATE = 500e6  # bytes a second: an ordinary SSD
SLACK = 1.1  # what the allocator holds beyond that: measured 0.96 to 1.2 of the sum on models of 15 and 30 M weights
GRADIENTS = 2  # times the activations of a part: they and their gradients
DECODED = 4  # copies of a block's weights at once in a touch-up: codes as floats, decoded, and gradients of both
PASSES = 5  # forward passes that a sequence of a touch-up takes as long as: original, model twice, gradients
MEASURED_SECONDS = 0.03  # for each of up to seven things


@dataclass(frozen=True)
class Work:
    """A run as sizes."""

    blocks: tuple[tuple[GroupWork, ...], ...]
    hidden: int  # size of the hidden states
    heads: int
    eager: bool  # attention is computed in full
    dtype: str  # of the model
    source_bytes: int
    output_bytes: int
    shard_bytes: int
    method: Method
    samples: int  # 0: the method looks at no data
    seq_len: int
    device: str
    touch_up: int = 0  # steps at the end
    scales_cache: bool = False  # all tokens run through the model once more
    measures_bits: bool = False  # what each group of layers loses by itself is measured first

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_len

    @property
    def tries(self) -> int:
        """How many times a block is quantized: by each candidate, and by the chosen one again."""
        return 1 + len(self.method.candidates)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else DTYPES[self.dtype]

    @property
    def groups(self) -> list[GroupWork]:
        return [group for block in self.blocks for group in block]

    @property
    def quantized(self) -> list[GroupWork]:
        return [group for group in self.groups if group.fmt is not None]

    @property
    def follows_original(self) -> bool:
        """Whether the model that is not quantized runs beside the one that is."""
        return self.compares or self.method.wants_drift

    @property
    def compares(self) -> bool:
        """Whether a block's outputs are held against those of that model."""
        return self.method.tunes_blocks or self.tries > 1

    @property
    def block_weights(self) -> int:
        """Of the largest block."""
        return max(sum(group.experts * group.weights for group in block) for block in self.blocks)

    @property
    def hidden_bytes(self) -> int:
        """The hidden states of all calibration tokens."""
        return self.tokens * self.hidden * self.compute_dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak, by where they lie."""

    ram: int
    gpu: int
    scratch: int  # on disk


def peak_memory(work: Work) -> Memory:
    """What a run holds at once."""
    place = choose_place(work.hidden_bytes, torch.device(work.device))
    # Of the original model beside the quantized one; what a compared block reads; what its twin reads, before and in
    # it; what experts read.
    kept = work.follows_original + work.compares + any(group.experts > 1 for group in work.quantized)
    kept += 2 * (work.compares and work.method.wants_drift)
    states = work.hidden_bytes * (1 + kept)
    beside = states if place == "host" else 0
    working = _calibrated_bytes(work) if work.samples else _rounding_bytes(work)
    working += states if place == "device" else 0
    working = max(working, _touch_up_bytes(work))
    writing = 2 * min(work.shard_bytes, work.output_bytes)  # tensors of one shard, and the same as bytes of a file
    scratch = states if place == "disk" else 0
    if work.device == "cpu":
        return Memory(PROCESS_BYTES + max(working + beside, writing), 0, scratch)
    return Memory(PROCESS_BYTES + max(beside, writing), CUDA_BYTES + working, scratch)


def _rounding_bytes(work: Work) -> int:
    """One layer in float32 with what rounding needs in between, and its block as codes and packed."""
    return 3 * 4 * max(group.inputs * max(group.layers) for group in work.quantized) + 2 * work.block_weights


def _calibrated_bytes(work: Work) -> int:
    """One block, the method at work on its largest group, and the activations of one batch."""
    itemsize = work.compute_dtype.itemsize
    weights = itemsize * (1 + work.method.wants_drift)  # those of the original block, too
    block = work.block_weights * (weights + 1)  # and a byte for each one's code until it is packed
    statistics = max(_statistics_bytes(work, group) for group in work.quantized)
    method = max(work.method.cost_bytes(group) for group in work.quantized)
    rounding = max(statistics + method, _experts_bytes(work)) + _batch_bytes(work) + _inner_bytes(work)
    return int(SLACK * (block + max(rounding, _tuning_bytes(work))))


def _tuning_bytes(work: Work) -> int:
    """Of a block that is tuned: the weights as they were rounded from, and a batch with all that gradients need."""
    if not work.method.tunes_blocks:
        return 0
    parts = 2 * GRADIENTS * _batch_bytes(work)  # attention and MLP are in memory together
    return work.block_weights * work.compute_dtype.itemsize + work.method.tuning_bytes(work.block_weights) + parts


def _touch_up_bytes(work: Work) -> int:
    """The whole model, all codes, and of one block the decoded weights with their gradients."""
    if not work.touch_up:
        return 0
    itemsize = work.compute_dtype.itemsize
    model = work.source_bytes // DTYPES[work.dtype].itemsize * itemsize
    codes = sum(group.experts * group.weights for group in work.quantized)
    return int(SLACK * (model + codes + DECODED * work.block_weights * itemsize + 2 * GRADIENTS * _batch_bytes(work)))


def _statistics_bytes(work: Work, group: GroupWork) -> int:
    """Of one group, or of one expert. A drift is gone before H is copied."""
    matrices = COPIES if work.method.wants_hessian else 0
    return 4 * matrices * group.inputs**2 + 4 * min(SAMPLE, work.tokens) * group.inputs


def _experts_bytes(work: Work) -> int:
    """Of the experts that are rounded together."""
    routed = [group for group in work.quantized if group.experts > 1]
    if not routed:
        return 0
    largest = max(expert_bytes(group.outputs, group.inputs) for group in routed)
    together = how_many_together(torch.device(work.device), largest)
    return largest * min(together, max(group.experts for group in routed))


def _batch_bytes(work: Work) -> int:
    """What one batch leaves in memory on its way through a residual part of a block."""
    most = BATCH_TOKENS if work.method.tunes_blocks else batch_tokens(torch.device(work.device), eager=work.eager)
    sequences = max(1, most // work.seq_len)
    widest = max(group.inputs * group.per_token for group in work.groups)
    linear = 4 * sequences * work.seq_len * (widest + work.hidden) * work.compute_dtype.itemsize
    scores = 3 * 4 * sequences * work.heads * work.seq_len**2 if work.eager else 0
    return linear + scores


def _inner_bytes(work: Work) -> int:
    """The inputs of a part's last linear, and of its twin's, kept for all tokens where that is not too much; never
    those of experts."""
    itemsize = work.compute_dtype.itemsize
    sizes = [work.tokens * group.inputs * itemsize for group in work.groups if group.experts == 1]
    return (1 + work.method.wants_drift) * max((size for size in sizes if size <= KEPT_INNER_BYTES), default=0)


def estimated_seconds(work: Work) -> float:
    """About how long a run takes: computing, storing, reading and writing."""
    speed, storing_seconds = _measure(work)
    total = work.source_bytes / DISK_RATE + 3 * work.output_bytes / DISK_RATE  # kept, written, verified
    total += sum(group.experts * group.weights for group in work.quantized) * storing_seconds
    if work.samples:
        runs = work.tries * (1 + work.method.wants_drift) + work.follows_original + work.scales_cache
        tokens = work.tokens * runs + work.seq_len * work.method.tuned_sequences(work.samples)
        tokens += work.seq_len * work.touch_up * min(BATCH, work.samples) * PASSES
        forward = sum(2 * tokens * group.forward_weights for group in work.groups)
        total += forward / speed.product_flops
    if work.measures_bits:
        total += _measuring_seconds(work, speed)
    groups = Counter(work.quantized)  # blocks are mostly alike
    return total + sum(times * group.experts * _group_seconds(work, group, speed) for group, times in groups.items())


def _measuring_seconds(work: Work, speed: Speed) -> float:
    """Every group is rounded once, by few tokens, and fewer run on from there through the blocks after it."""
    method = next(iter(work.method.candidates.values()), work.method)  # that rounds a group by itself
    fitted = min(work.tokens, FITTED_TOKENS * max(group.inputs for group in work.quantized))
    scored = SCORED * min(LENGTH, work.seq_len)
    total, streams = 0.0, 1
    for block in work.blocks:
        streams += sum(group.fmt is not None for group in block)
        tokens = 2 * fitted + streams * scored  # those fitted to run once to be seen, and once to the next block
        total += sum(2 * tokens * group.forward_weights for group in block) / speed.product_flops
    for group in work.quantized:
        sums = 2 * fitted * group.share * group.inputs**2 / speed.product_flops
        total += group.experts * (method.cost_seconds(group, fitted, speed) + sums)
    return total


def _group_seconds(work: Work, group: GroupWork, speed: Speed) -> float:
    """What the method does; where it wants H, its sum and the outputs' energy, which losses in the log relate to."""
    total = work.method.cost_seconds(group, work.tokens, speed)
    if work.method.wants_hessian:
        sums = 1 + (work.method.wants_drift and group.experts == 1)
        each = sums * 2 * work.tokens * group.share * group.inputs**2 / speed.product_flops
        total += work.tries * (each + group.hessian_flops / speed.float32_flops)
    return total


def _measure(work: Work) -> tuple[Speed, float]:
    """The device's speed, and the seconds that it takes to pack one weight and read it back."""
    device = torch.device(work.device)
    float32 = _product_rate(device, torch.float32)
    same = work.compute_dtype == torch.float32
    largest = max(work.quantized, key=lambda group: group.weights)
    assert largest.fmt is not None
    rounding, storing = _weight_times(largest.fmt, (largest.outputs, largest.inputs), device)
    product = float32 if same else _product_rate(device, work.compute_dtype)
    return Speed(device, product, float32, rounding, _Stopwatch(device)), storing


class _Stopwatch:
    """Measures what a method asks for, once for each name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], object]) -> float:
        if name not in self._measured:
            self._measured[name] = _seconds(work, self._device)
        return self._measured[name]


@cache
def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second in large products of matrices."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _seconds(lambda: matrix @ matrix, device)


@cache
def _weight_times(fmt: Format, shape: Shape, device: torch.device) -> tuple[float, float]:
    """Seconds for one weight: to round and decode it, and to pack it and read it back; on rows of a real width."""
    rows = 128  # packs evenly in every format
    weight = torch.randn(rows * max(1, 262_144 // (rows * shape[1])), shape[1], device=device)
    rounded = fmt.with_input_scale(fmt.quantize(weight), 1.0)
    rounding = _seconds(lambda: fmt.quantize(weight).dequantize(), device)
    packing = _seconds(lambda: fmt.decode(fmt.pack(rounded)), device)
    return rounding / weight.numel(), packing / weight.numel()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds for one call, after one to warm up: the fastest, since other processes only ever slow one down."""
    work()
    fastest, begun = math.inf, _now(device)
    while fastest == math.inf or _now(device) - begun < MEASURED_SECONDS:
        start = _now(device)
        work()
        fastest = min(fastest, _now(device) - start)
    return fastest


def _now(device: torch.device) -> float:
    """The time when everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
