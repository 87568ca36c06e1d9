"""What can be measured: something that gives logits for a window of tokens.

reference   transformers with decoded weights: what the checkpoint means
runtime     our decoder with its kernels and its paged cache: what is served
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.defaults import WINDOW
from quantkit.errors import InputError
from quantkit.eval.quality.precise_logits import compute_logits_in_float32
from quantkit.formats.base import check_choice
from quantkit.kernels.cpu.installed import can_compile
from quantkit.progress import Progress, silent
from quantkit.reference import load_reference
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.scoring import score_tokens
from quantkit.runtime.startup import start_engine
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKENDS = ("reference", "runtime")


@dataclass(frozen=True)
class Arithmetic:
    """How logits were computed."""

    backend: str  # one of BACKENDS
    dtype: str
    device: str
    detail: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.detail}, {self.dtype} on {self.device}"


class Predictor(Protocol):
    """A model that predicts. `folder` is where its tokenizer is."""

    @property
    def folder(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    def logits(self, ids: Tensor) -> Tensor:
        """[window - 1, vocab] of a window of ids [window]: the last position predicts nothing that is scored."""
        ...

    def describe(self) -> Arithmetic: ...


@dataclass(frozen=True, eq=False)
class ReferencePredictor:
    """A transformers model, computed whole windows at once."""

    model: PreTrainedModel
    folder: Path
    activations: str = "exact"

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids[None].to(self.model.device), use_cache=False).logits
        return logits[0, :-1]

    def describe(self) -> Arithmetic:
        rounded = "as served" if self.activations == "served" else "exact"
        detail = f"weights decoded, activations {rounded}"
        return Arithmetic("reference", str(self.model.dtype)[6:], str(self.model.device), detail)


@dataclass(frozen=True, eq=False)
class RuntimePredictor:
    """An engine's decoder, fed in steps of `step_tokens`."""

    engine: Engine
    folder: Path
    step_tokens: int

    @property
    def vocab_size(self) -> int:
        return self.engine.config.vocab

    def logits(self, ids: Tensor) -> Tensor:
        return score_tokens(self.engine, ids, self.step_tokens)[:-1]

    def describe(self) -> Arithmetic:
        on_cpu = "kernels for CPUs" if can_compile() else "plain torch"
        kernels = "Triton kernels" if self.engine.runner.device.type == "cuda" else on_cpu
        dtype = str(self.engine.runner.decoder.weights.dtype)[6:]
        detail = f"{kernels}, paged cache, step_tokens {self.step_tokens}"
        detail += self.engine.options.as_told
        if self.engine.options.kv_dtype != "auto":
            detail += f", KV cache {self.engine.options.kv_dtype}"
        return Arithmetic("runtime", dtype, str(self.engine.runner.device), detail)


@dataclass(frozen=True, eq=False)
class RememberedPredictor:
    """Another predictor that computes no window twice. It holds the logits of all of them: for small models."""

    predictor: Predictor
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by the ids of a window

    @property
    def folder(self) -> Path:
        return self.predictor.folder

    @property
    def vocab_size(self) -> int:
        return self.predictor.vocab_size

    def logits(self, ids: Tensor) -> Tensor:
        key = tuple(ids.tolist())
        if key not in self.known:
            self.known[key] = self.predictor.logits(ids)
        return self.known[key]

    def describe(self) -> Arithmetic:
        return self.predictor.describe()


def load_predictor(
    model: str | Path,
    backend: str = "reference",
    *,
    window: int = WINDOW,
    dtype: str | None = None,
    device: str = "cpu",
    activations: str = "served",
    step_tokens: int | None = None,
    head_bits: int | None = None,
    kv_dtype: str | None = None,
    arithmetic: str | None = None,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    pipeline_parallel: int = 1,
    on_part: Progress = silent,
) -> ReferencePredictor | RuntimePredictor:
    """A model, ready for windows of this size.

    `dtype`: float32 unless given; the runtime on a GPU takes the checkpoint's own. `activations` (served or exact) is
    the reference's, `step_tokens` (whole windows unless given), `head_bits`, `kv_dtype`, `arithmetic` and the ranks are
    the runtime's.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "reference":
        if step_tokens is not None:
            raise InputError(f"step_tokens is {step_tokens}, but the reference runs whole windows; use backend runtime")
        if head_bits is not None:
            raise InputError(f"head_bits is {head_bits}, but the reference keeps the output layer; use backend runtime")
        if kv_dtype is not None:
            raise InputError(f"kv_dtype is {kv_dtype}, but the reference has no KV cache; use backend runtime")
        if arithmetic is not None:
            raise InputError(f"arithmetic is {arithmetic}, but the reference has no kernels; use backend runtime")
        if tensor_parallel > 1 or pipeline_parallel > 1:
            raise InputError("tensor_parallel and pipeline_parallel need backend runtime")
        return _load_reference(model, window, dtype or "float32", device, activations, on_part)
    if activations != "served":
        raise InputError(
            "the runtime always rounds activations as it serves them; use backend reference for exact ones"
        )
    more: dict[str, Any] = {
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "head_bits": head_bits,
        "arithmetic": arithmetic,
    }
    more |= {"pipeline_parallel": pipeline_parallel, "kv_dtype": kv_dtype or "auto"}
    return _load_runtime(model, window, dtype, device, step_tokens, more, on_part)


def _load_reference(
    model: str | Path, window: int, dtype: str, device: str, activations: str, on_part: Progress
) -> ReferencePredictor:
    loaded = load_reference(model, dtype, device, activations=activations, on_tensor=on_part)
    if dtype != "float32":
        compute_logits_in_float32(loaded)
    _check_window(window, getattr(loaded.config, "max_position_embeddings", None))
    return ReferencePredictor(loaded, model_folder(model), activations)


def _load_runtime(
    model: str | Path,
    window: int,
    dtype: str | None,
    device: str,
    step_tokens: int | None,
    more: dict[str, Any],
    on_part: Progress,
) -> RuntimePredictor:
    """One place, a cache for one window: length-dependent rope is that of a window, as in the reference."""
    folder = model_folder(model)
    _check_window(window, Checkpoint(folder).config.get("max_position_embeddings"))
    options = EngineOptions(
        device=device,
        dtype=dtype,
        max_context=window,
        max_sequences=1,
        step_tokens=step_tokens,
        kv_tokens=window,
        graphs=False,
        **more,
    )
    engine = start_engine(folder, options, on_block=on_part)
    return RuntimePredictor(engine, folder, min(options.budget, window))


def _check_window(window: int, limit: int | None) -> None:
    limit = limit or window
    if not 2 <= window <= limit:
        raise InputError(f"a window of {window} tokens does not fit the model; choose 2 to {limit}")
