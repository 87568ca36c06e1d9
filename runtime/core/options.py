"""How an engine runs: what the command line and `LLM` take, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.devices import find_device
from quantkit.errors import InputError
from quantkit.formats.base import DTYPES, check_choice
from quantkit.kernels.card import runs_kernels
from quantkit.kernels.linear.arithmetic import ARITHMETIC
from quantkit.runtime.core.kv_dtypes import KV_DTYPES
from quantkit.runtime.core.speculative_options import SpeculativeOptions

MOST_RANKS = 1024
HEAD_BITS = (8, 4)
WARM_UPS = ("all", "background", "none")  # first (or True), in the background of a server, not (or False)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """None: chosen for the model and the device."""

    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str | None = None  # of activations; None: the checkpoint's own, float32 on a CPU
    max_context: int | None = None  # tokens of a prompt and its answer; None: the model's, as far as memory allows
    max_sequences: int | None = None  # that run at the same time; None: 256, on a CPU 16
    step_tokens: int | None = None  # budget of one step; None: 8192, on a CPU 512
    page_size: int = 16
    kv_dtype: str = "auto"  # auto (that of activations) | bf16 | fp8 | int8 | int4
    kv_tokens: int | None = None  # size of the cache; None: what memory allows
    arithmetic: str | None = None  # 16-bit | fp8 | fp8-copy, of packed weights; None: as the checkpoint says
    head_bits: int | None = None  # 8 or 4: the output layer is rounded to so many when it is loaded
    memory_share: float = 0.9  # of the device's memory that quantkit may use
    swap_gib: float = 0.0  # host memory for preempted sequences; 0: they are computed anew
    share_prefixes: bool = True
    graphs: bool = True  # CUDA graphs for steps that only decode
    overlap: bool | None = None  # prepare a step while the one before runs; None: on a GPU
    tensor_parallel: int = 1  # processes, one on each GPU, among which every layer is divided
    expert_parallel: bool = False  # experts are divided among these processes, which a model with experts asks for
    pipeline_parallel: int = 1  # stages, each with some of the blocks
    micro_batches: int | None = None  # steps on their way through the stages at once; None: one for each stage
    speculative: str | None = None  # ngram, draft=PATH, self=RECIPE, medusa=PATH or eagle=PATH: guess, verify at once
    warm_up: str | bool = "none"  # of WARM_UPS: kernels and graphs for every size, made before they are needed
    seed: int = 0  # of requests that bring none

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, tuple(DTYPES))
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.arithmetic is not None:
            check_choice("arithmetic", self.arithmetic, ARITHMETIC)
        if self.head_bits is not None and (type(self.head_bits) is not int or self.head_bits not in HEAD_BITS):
            raise InputError(
                f"head_bits is {self.head_bits!r}, but must be 8 or 4; leave it out to keep the output layer"
            )
        for name in ("max_context", "max_sequences", "step_tokens", "kv_tokens", "micro_batches"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{name} is {value!r}, but must be a positive whole number")
        for name in ("tensor_parallel", "pipeline_parallel"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST_RANKS:
                raise InputError(f"{name} is {value!r}, but must be a whole number from 1 to {MOST_RANKS}")
        if isinstance(self.warm_up, bool):
            object.__setattr__(self, "warm_up", "all" if self.warm_up else "none")
        check_choice("warm_up", str(self.warm_up), WARM_UPS)
        if self.expert_parallel and self.tensor_parallel == 1:
            raise InputError("expert_parallel divides experts among the ranks of tensor_parallel, which is 1; set both")
        if self.micro_batches is not None and self.pipeline_parallel == 1:
            raise InputError("micro_batches is about the stages of pipeline_parallel, which is 1; leave it out")
        if type(self.page_size) is not int or self.page_size < 16 or self.page_size & (self.page_size - 1):
            raise InputError(f"page_size is {self.page_size}, but must be a power of two, 16 or more")
        if not 0.05 <= self.memory_share <= 0.98:
            raise InputError(f"memory_share is {self.memory_share}, but must be between 0.05 and 0.98")
        if not 0 <= self.swap_gib < 1e6:
            raise InputError(f"swap_gib is {self.swap_gib}, but must be 0 or the gibibytes of host memory to use")

    @property
    def torch_device(self) -> torch.device:
        return find_device(self.device)

    @property
    def on_gpu(self) -> bool:
        return runs_kernels(self.torch_device)

    def torch_dtype(self, checkpoint: str) -> torch.dtype:
        """Of activations, for a checkpoint of this dtype."""
        if self.dtype is not None:
            return DTYPES[self.dtype]
        if not self.on_gpu:
            return torch.float32
        return dtype_on_gpu(checkpoint)

    @property
    def sequences(self) -> int:
        return self.max_sequences or (256 if self.on_gpu else 16)

    @property
    def budget(self) -> int:
        return max(self.step_tokens or (8192 if self.on_gpu else 512), 1)

    @property
    def host_bytes(self) -> int:
        """Of one rank, for preempted sequences."""
        return int(self.swap_gib * 2**30) // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def overlaps(self) -> bool:
        return self.on_gpu if self.overlap is None else self.overlap

    @property
    def speculation(self) -> SpeculativeOptions | None:
        """None: nobody guesses."""
        return None if self.speculative is None else SpeculativeOptions.parse(self.speculative)

    @property
    def as_told(self) -> str:
        """What differs from the checkpoint, to be put behind its format in a line."""
        arithmetic = "" if self.arithmetic is None else f", arithmetic {self.arithmetic}"
        return arithmetic + ("" if self.head_bits is None else f", head {self.head_bits} bit")

    @property
    def in_stages(self) -> int:
        """Steps on their way through the stages at once."""
        return self.micro_batches or self.pipeline_parallel


def dtype_on_gpu(checkpoint: str) -> torch.dtype:
    """Of activations, for a checkpoint of this dtype: 16 bits."""
    return torch.float16 if checkpoint == "float16" else torch.bfloat16
