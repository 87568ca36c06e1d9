"""Where memory goes, before anything is loaded: weights, room to compute, and what is left for the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.kernels.attention.latent.pieces import scratch_bytes
from quantkit.runtime.core.kv_dtypes import check_kv_dtype, kv_kind
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.decode_graphs import padded_guesses
from quantkit.runtime.device.host_pages import DEVICE_BYTES, room_for
from quantkit.runtime.device.prompt_graphs import TOKENS
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.weight_sizes import tensor_bytes
from quantkit.runtime.sampling.rejection import VERIFIED_BYTES
from quantkit.runtime.sampling.sampler import SAMPLED_ROWS, SHAPED_BYTES, TABLE_BYTES
from quantkit.wording import human_bytes

_CPU_CACHE = 2 << 30  # bytes; a laptop has other things to do
_LIBRARIES = 512 << 20  # what CUDA, cuBLAS and compiled kernels take beside torch's own memory
_PROMPT_ROWS = 512  # rows of logits at once, for log-probabilities of prompts


AGREED = ("pages", "max_context", "host_pages")  # of a plan: ranks take the least that one of them has


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device."""

    available: int  # what quantkit may use
    weights: int
    activations: int
    graphs: int
    page_bytes: int
    page_size: int
    pages: int  # the padding page included
    max_context: int
    draft_page_bytes: int = 0  # of a draft model's cache, which has as many pages
    host_pages: int = 0  # for those who give way, in host memory

    @property
    def cache(self) -> int:
        return self.pages * (self.page_bytes + self.draft_page_bytes)

    @property
    def left(self) -> int:
        """Of what may be used, beside everything but the cache."""
        return self.available - self.weights - self.activations - self.graphs

    @property
    def kv_tokens(self) -> int:
        return (self.pages - 1) * self.page_size

    def describe(self) -> str:
        parts = {
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            f"cache for {self.kv_tokens:,} tokens": self.cache,
        }
        listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size)
        return f"{human_bytes(self.available)} of memory: {listed}; contexts up to {self.max_context:,} tokens"


def plan_memory(
    config: ModelConfig,
    weights: int,
    dtype: torch.dtype,
    options: EngineOptions,
    available: int | None = None,
    draft: ModelConfig | None = None,
) -> MemoryPlan:
    """The plan for a model (and its draft) of so many bytes; raises InputError, naming the flags to change, where it
    does not fit."""
    if available is None:
        available = available_memory(options.torch_device, options.memory_share)
    plan = _without_pages(config, weights, dtype, options, available, draft)
    return _with_pages(plan, plan.left, options)


@dataclass(frozen=True)
class CacheRoom:
    """What is left for a cache, and what its pages take."""

    bytes: int
    page_bytes: int  # a draft's too
    page_size: int

    @property
    def tokens(self) -> int:
        return max(0, self.bytes // self.page_bytes - 1) * self.page_size  # one page pads

    def bytes_of(self, tokens: int) -> int:
        return (-(-tokens // self.page_size) + 1) * self.page_bytes


def room_for_cache(
    config: ModelConfig,
    weights: int,
    dtype: torch.dtype,
    options: EngineOptions,
    available: int,
    draft: ModelConfig | None = None,
) -> CacheRoom:
    """Of a plan that need not come out."""
    plan = _without_pages(config, weights, dtype, options, available, draft)
    return CacheRoom(max(0, plan.left), plan.page_bytes + plan.draft_page_bytes, plan.page_size)


def _without_pages(
    config: ModelConfig,
    weights: int,
    dtype: torch.dtype,
    options: EngineOptions,
    available: int,
    draft: ModelConfig | None,
) -> MemoryPlan:
    page_bytes = _page_bytes(config, dtype, options)
    context = min(options.max_context or config.max_positions, config.max_positions)
    if options.max_context is not None and options.max_context > config.max_positions:
        raise InputError(
            f"max_context is {options.max_context}, but the model was made for {config.max_positions} positions"
        )
    in_graphs = (config, draft) if options.on_gpu and options.graphs else ()
    return MemoryPlan(
        available=available,
        weights=weights,
        activations=_activation_bytes(config, dtype, options, draft),
        graphs=sum(_graph_bytes(one, dtype, options) for one in in_graphs if one is not None),
        page_bytes=page_bytes,
        page_size=options.page_size,
        pages=0,
        max_context=context,
        draft_page_bytes=0 if draft is None else _page_bytes(draft, dtype, options),
        host_pages=room_for(page_bytes, options.host_bytes),
    )


def refine_plan(
    plan: MemoryPlan, config: ModelConfig, dtype: torch.dtype, options: EngineOptions, draft: ModelConfig | None = None
) -> MemoryPlan:
    """The plan once more, with what the weights really took."""
    device = options.torch_device
    if device.type != "cuda":
        return plan
    torch.cuda.empty_cache()
    left = available_memory(device, options.memory_share)
    return plan_memory(config, plan.weights, dtype, options, available=left + plan.weights, draft=draft)


def _with_pages(plan: MemoryPlan, left: int, options: EngineOptions) -> MemoryPlan:
    page_bytes = plan.page_bytes + plan.draft_page_bytes
    fits = max(0, left // page_bytes)
    wanted = fits
    useful = -(-plan.max_context // plan.page_size) * options.sequences + 1
    if options.kv_tokens is not None:
        wanted = -(-options.kv_tokens // plan.page_size) + 1
    elif not options.on_gpu:
        wanted = min(fits, max(_CPU_CACHE // page_bytes, -(-plan.max_context // plan.page_size) + 1))
    pages = min(wanted, useful) if options.kv_tokens is None else wanted
    if pages > fits or fits < 2:
        raise InputError(
            f"the model does not fit: {_shortage(plan, pages, fits)}. "
            "Lower --max-context, --kv-tokens, --max-sequences or --step-tokens, use --kv-dtype int8, raise "
            "--memory-share, or quantize to fewer bits"
        )
    reach = (pages - 1) * plan.page_size
    if plan.max_context > reach and options.max_context is not None:
        raise InputError(
            f"the cache holds {reach:,} tokens, fewer than max_context {plan.max_context:,}; lower --max-context, use "
            "--kv-dtype int8, or raise --memory-share or --kv-tokens"
        )
    return replace(plan, pages=pages, max_context=min(plan.max_context, reach))


def _shortage(plan: MemoryPlan, pages: int, fits: int) -> str:
    fixed = plan.weights + plan.activations + plan.graphs
    return (
        f"weights {human_bytes(plan.weights)}, activations {human_bytes(plan.activations)} and graphs "
        f"{human_bytes(plan.graphs)} leave {human_bytes(max(0, plan.available - fixed))} of "
        f"{human_bytes(plan.available)} for a cache of {human_bytes(max(pages, 2) * plan.page_bytes)}"
    )


def available_memory(device: torch.device, share: float) -> int:
    """Bytes that quantkit may use: its share of the device, less what others hold."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(min(free, free - total * (1 - share))))
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * share)
    return 8 << 30


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, arithmetic: str | None = None) -> int:
    """What the weights take on the device."""
    return sum(tensor_bytes(checkpoint, dtype, arithmetic).values())


def _page_bytes(config: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> int:
    check_kv_dtype(options.kv_dtype, config.cache_entry)
    kinds, heads, width = config.cache_entry
    token_bytes = kv_kind(options.kv_dtype, dtype).token_bytes(width)
    return config.layers * kinds * heads * token_bytes * options.page_size


def _activation_bytes(
    config: ModelConfig, dtype: torch.dtype, options: EngineOptions, draft: ModelConfig | None
) -> int:
    """The most that one step holds at a time, estimated from the sizes of its tensors."""
    in_mlp = 3 * config.token_channels + config.routed_channels
    width = max(in_mlp, config.attention_numbers) + 3 * config.hidden
    hidden = options.budget * width * dtype.itemsize
    decoded = config.decoded_weights * dtype.itemsize  # one weight in 16 bit, for many tokens
    on_gpu = options.on_gpu
    libraries = _LIBRARIES if on_gpu else 0
    travelling = DEVICE_BYTES if on_gpu and options.swap_gib else 0
    drafted = draft is not None
    expanded = max(expanded_latent_bytes(one, dtype, options.max_context) for one in (config, draft or config))
    fixed = decoded + libraries + travelling + (expanded if on_gpu else 0)
    return hidden + fixed + _logits_bytes(config.vocab, dtype, options, drafted)


def expanded_latent_bytes(config: ModelConfig, dtype: torch.dtype, max_context: int | None) -> int:
    """Of keys and values that prompts make of latents on a GPU, and of what they are made from."""
    if config.latent is None:
        return 0
    context = min(max_context or config.max_positions, config.max_positions)
    return scratch_bytes(config.latent.expanded, config.latent.kept, dtype.itemsize, context)


def _logits_bytes(vocab: int, dtype: torch.dtype, options: EngineOptions, drafted: bool) -> int:
    """Of a step in which everybody guesses, and whatever is made of its logits."""
    guesses = 0 if options.speculation is None else options.speculation.most
    rows = max(options.sequences, min(options.sequences * (1 + guesses), options.budget), _PROMPT_ROWS)
    copies = 1 + 2 * (options.tensor_parallel > 1)  # parts of several ranks are put together
    logits = rows * vocab * dtype.itemsize * copies
    shaped = SAMPLED_ROWS * vocab * SHAPED_BYTES
    tables = options.sequences * vocab * TABLE_BYTES
    if not drafted:
        return logits + shaped + tables
    # A loop leaves logits of all guesses; early ones stay beside those of a second loop.
    kept = 2 * options.sequences * padded_guesses(guesses) * vocab * dtype.itemsize
    verified = SAMPLED_ROWS * vocab * 4 + VERIFIED_BYTES  # beside the shaped ones
    return logits + max(shaped, verified) + tables + kept


def _graph_bytes(config: ModelConfig, dtype: torch.dtype, options: EngineOptions) -> int:
    """All graphs of a model share the memory of the largest one."""
    width = 4 * config.token_channels + config.routed_channels + 4 * config.hidden + 4 * config.attended
    decoded = config.decoded_weights * dtype.itemsize  # one weight in 16 bit, for many tokens
    rows = max(options.sequences * 4, TOKENS[-1])
    return rows * width * dtype.itemsize + decoded + (64 << 20)
