"""Engines behind one interface: load a folder, give log-probabilities of tokens, forget the folder again."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_losses
from quantkit.engines import Layers, verdicts
from quantkit.errors import InputError, did_you_mean
from quantkit.formats import dialect_of

# Read by gptqmodel and torch when they are imported: they would start many threads, and compile for minutes.
_FOR_SMALL_MACHINES = {"GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


class Adapter(Protocol):
    """One engine in this process. It holds one checkpoint at a time."""

    engine: str  # as tables name it
    distribution: str  # as package indexes name it
    excuses: tuple[str, ...]  # in what it says where it failed for reasons that lie outside of the checkpoint

    def packages(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What this version of the engine needs beside itself for a checkpoint."""
        ...

    def load(self, checkpoint: Checkpoint, window: int) -> str:
        """Takes the checkpoint for windows of so many tokens; gives the dtype that it computes in."""
        ...

    def logprobs(self, ids: Tensor) -> Tensor:
        """Of every token but the first, float64 [windows, window - 1], for ids [windows, window]."""
        ...

    def forget(self) -> bool:
        """Lets go of the checkpoint, loaded or not; whether the process is as good as new."""
        ...


def version_of(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def find_adapter(engine: str, device: str) -> Adapter:
    """By the engine's name, however it is capitalized."""
    makers: dict[str, Callable[[str], Adapter]] = {"transformers": TransformersAdapter, "vllm": _vllm}
    if engine.lower() not in makers:
        raise InputError(f"no adapter for '{engine}'; {did_you_mean(engine, makers)}")
    return makers[engine.lower()](device)


def _vllm(device: str) -> Adapter:
    from quantkit.eval.peers.vllm_load import VllmAdapter

    return VllmAdapter()


def ways_to_load(checkpoint: Checkpoint) -> dict[str, Any]:
    """What transformers must be told beside the folder, as `DECODE_ZERO_POINTS` says."""
    advised = {verdict.engine: verdict.advice for verdict in verdicts(Layers(checkpoint.formats))}
    if not advised["transformers"]:
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


class TransformersAdapter:
    """transformers with the packages that its quantizers need."""

    engine = "transformers"
    distribution = "transformers"
    excuses: tuple[str, ...] = ()

    def __init__(self, device: str) -> None:
        self._device = device
        self._model: Any = None

    def packages(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        return dialect_of(checkpoint.formats).packages.get("transformers", ()) if checkpoint.formats else ()

    def load(self, checkpoint: Checkpoint, window: int) -> str:
        """In float32 where the loader takes that: then only the layout can make a difference; else in its own dtype."""
        try:
            self._load(checkpoint, torch.float32, window)
        except (ValueError, TypeError, RuntimeError, NotImplementedError):
            self._load(checkpoint, "auto", window)
        return str(self._model.dtype)[6:]

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype | str, window: int) -> None:
        """With one short call: some kernels refuse a dtype only when they run."""
        for name, value in _FOR_SMALL_MACHINES.items():
            os.environ.setdefault(name, value)
        from transformers import AutoModelForCausalLM

        how = ways_to_load(checkpoint) | {"dtype": dtype, "device_map": self._device}
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, **how).eval()
        self._logits(torch.zeros(1, min(window, 8), dtype=torch.long))

    @torch.inference_mode()
    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(ids.to(self._model.device), use_cache=False).logits
        return logits

    def logprobs(self, ids: Tensor) -> Tensor:
        return torch.stack([-token_losses(self._logits(row[None])[0, :-1].cpu(), row[1:]) for row in ids])

    def forget(self) -> bool:
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True
